"""Liger's kernels against the formulas, where there is a GPU and the extra."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="the extra liger is not installed"),
]
TOLERANCE = 1e-5
ROWS, HEADS, TOKENS, WIDTH = 1, 4, 37, 64


@pytest.fixture
def liger() -> ModuleType:
    return importlib.import_module("fovea.models.kernels_liger")


def assert_same(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Outputs and all gradients."""
    results = []
    for function in (ours, theirs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        # the kernels write over what they are handed: not over leaves
        out = function(*(x * 1 for x in leaves))
        (out * torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)).sum().backward()
        results.append((out, *(x.grad for x in leaves)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=TOLERANCE, rtol=TOLERANCE)


def test_rms_norm(liger: ModuleType) -> None:
    x, weight = torch.randn(TOKENS, WIDTH, device="cuda"), torch.randn(WIDTH, device="cuda")
    theirs = lambda x, weight: F.rms_norm(x, (WIDTH,), weight, 1e-6)  # noqa: E731
    assert_same(lambda x, weight: liger.rms_norm(x, weight, 1e-6), theirs, x, weight)


def test_silu_times(liger: ModuleType) -> None:
    gate, up = torch.randn(2, TOKENS, WIDTH, device="cuda").unbind()
    assert_same(liger.silu_times, lambda gate, up: F.silu(gate) * up, gate, up)


def test_rotary_positions(liger: ModuleType) -> None:
    query, key = torch.randn(2, ROWS, HEADS, TOKENS, WIDTH, device="cuda").unbind()
    angles = torch.randn(ROWS, TOKENS, WIDTH // 2, device="cuda").repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    ours, theirs = (
        lambda q, k, turn=turn: torch.cat(turn(q, k, cos, sin)) for turn in (liger.rotate, apply_rotary_pos_emb)
    )
    assert_same(ours, theirs, query, key)
