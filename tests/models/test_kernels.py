"""Kernels of a layer against transformers and autograd, and heads that are read again against heads that are kept."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb

from fovea.models import kernels
from fovea.models.decoder import decoder_shape, kernels_for
from fovea.models.heads import HeadNorm, Triple, heads, unfused_heads
from fovea.models.kernels import ReadSaved, RmsNorm, silu_times, use_fused_layers
from fovea.models.rope import Rope, rotate
from fovea.models.tiny import TinyParts


def outputs_and_gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    out = module(x)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    assert x.grad is not None
    return [out, x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_layer_equals_its_original(parts: TinyParts, dtype: torch.dtype) -> None:
    parts.network.to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # one rounding of bfloat16 is 8e-3
    original, fused = parts.network, copy.deepcopy(parts.network)
    use_fused_layers(fused, kernels_for(decoder_shape(fused.config.text_config)).norm)
    compared = set()
    for (name, module), (_, other) in zip(original.named_modules(), fused.named_modules(), strict=True):
        kind = type(module).__name__
        if not kind.endswith(("RMSNorm", "PatchEmbed")):
            continue
        width = module.proj.weight[0].numel() if kind.endswith("PatchEmbed") else module.weight.shape[0]
        x = torch.randn(6, width, generator=torch.Generator().manual_seed(0)).to(dtype)
        for a, b in zip(outputs_and_gradients(module, x), outputs_and_gradients(other, x), strict=True):
            torch.testing.assert_close(b, a, atol=tolerance, rtol=tolerance, msg=name)
        compared.add(kind)
    assert len(compared) >= 2, compared


def test_the_gradient_is_that_of_the_formula() -> None:
    x = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)

    written_out = torch.autograd.functional.jacobian(
        lambda a, w: w * a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-6), (x, weight)
    )
    ours = torch.autograd.functional.jacobian(lambda a, w: RmsNorm.apply(a, w, 1e-6), (x, weight))
    for a, b in zip(ours, written_out, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_a_frozen_weight_gets_no_gradient() -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.ones(8)
    RmsNorm.apply(x, weight, 1e-6).sum().backward()
    assert x.grad is not None
    assert weight.grad is None


TOKENS, HEADS, KEY_HEADS, WIDTH = 7, 4, 2, 8


def rope(width: int = WIDTH) -> Rope:
    angles = torch.randn(TOKENS, width // 2).repeat(1, 2)
    return Rope.of(angles.cos(), angles.sin())


def projections(dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(TOKENS, heads * WIDTH).to(dtype) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]


def run(function: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> tuple[list[Tensor], int]:
    """Outputs and gradients, and the bytes of rows of tokens that were saved for these."""
    leaves, saved = [x.clone().requires_grad_() for x in inputs], dict[int, Tensor]()

    def count(x: Tensor) -> Tensor:
        if x.shape[0] == TOKENS and x.shape[-1] == WIDTH:
            saved[x.data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        outs = function(*leaves)
    loss = sum((out.float() * torch.linspace(-1, 1, out.numel()).view_as(out)).sum() for out in outs)
    assert isinstance(loss, Tensor)
    loss.backward()
    return [*outs, *(x.grad for x in leaves if x.grad is not None)], sum(
        x.numel() * x.element_size() for x in saved.values()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_that_are_read_again_equal_those_that_are_kept(dtype: torch.dtype) -> None:
    kept, positions = projections(dtype), rope()
    positions = Rope(positions.cos_ND.to(dtype), positions.sin_ND.to(dtype), positions.signed_sin_ND.to(dtype))
    weights = [torch.rand(WIDTH).to(dtype) + 0.5 for _ in range(2)]

    def with_norm(function: Callable[..., Triple], *saved: Sequence[ReadSaved]) -> Callable[..., Triple]:
        def run_heads(query: Tensor, key: Tensor, value: Tensor, *norms: Tensor) -> Triple:
            # times 1: what is read again is not what went in
            projected = (query * 1, key * 1, value * 1)
            return function(projected, WIDTH, HeadNorm(*norms, 1e-6), positions, *saved)

        return run_heads

    saved = [lambda x=x: x.clone() for x in kept]
    reading, few_bytes = run(with_norm(heads, saved), *kept, *weights)
    keeping, many_bytes = run(with_norm(unfused_heads), *kept, *weights)

    for ours, theirs in zip(reading, keeping, strict=True):
        assert torch.equal(ours, theirs)
    assert few_bytes == 0
    # float32 copies of queries and keys, and what the rotation keeps once for all layers
    tables = 2 * TOKENS * WIDTH * dtype.itemsize
    assert many_bytes == TOKENS * (HEADS + KEY_HEADS) * WIDTH * 4 + tables


def test_swiglu_of_inputs_that_are_read_again_saves_none_of_them() -> None:
    gate, up = torch.randn(2, TOKENS, WIDTH).unbind()
    saved = [lambda x=x: x.clone() for x in (gate, up)]
    reading, few_bytes = run(lambda a, b: [silu_times(a * 1, b * 1, saved)], gate, up)
    keeping, many_bytes = run(lambda a, b: [silu_times(a * 1, b * 1)], gate, up)

    for ours, theirs in zip(reading, keeping, strict=True):
        assert torch.equal(ours, theirs)
    assert few_bytes == 0
    assert many_bytes == 3 * TOKENS * WIDTH * 4, "gate, up and silu(gate)"


@pytest.mark.parametrize("trained", [True, False])
def test_the_rotation_equals_that_of_transformers(trained: bool) -> None:
    positions = rope()
    query, key = torch.randn(TOKENS, HEADS, WIDTH), torch.randn(TOKENS, KEY_HEADS, WIDTH)

    def theirs(query: Tensor, key: Tensor) -> list[Tensor]:
        batch = (x.transpose(0, 1)[None] for x in (query, key))
        rotated = apply_rotary_pos_emb(*batch, positions.cos_ND[None], positions.sin_ND[None])
        return [x[0].transpose(0, 1) for x in rotated]

    if not trained:
        with torch.no_grad():
            torch.testing.assert_close(list(rotate(query, key, positions)), theirs(query, key))
        return
    ours, _ = run(lambda q, k: rotate(q, k, positions), query, key)
    expected, _ = run(theirs, query, key)
    torch.testing.assert_close(ours, expected)


def test_tables_narrower_than_a_head_are_not_for_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    """GLM turns half of each head, and Liger's kernel would turn the whole of it by these angles."""
    for part, name in (("rms_norm", "LigerRMSNorm"), ("rope", "LigerRope"), ("swiglu", "LigerSiLUMul")):
        module = ModuleType(part)
        setattr(module, f"{name}Function", None)
        monkeypatch.setitem(sys.modules, f"liger_kernel.ops.{part}", module)
    angles = torch.randn(5, 4).repeat(1, 2)
    query, key, rope = torch.randn(5, 2, 16), torch.randn(5, 1, 16), Rope.of(angles.cos(), angles.sin())
    # under another name, since the module that others import has the real package
    on_stand_ins = spec_from_file_location("kernels_on_stand_ins", Path(kernels.__file__).with_name("kernels_liger.py"))
    assert on_stand_ins is not None
    assert on_stand_ins.loader is not None
    on_stand_ins.loader.exec_module(liger := module_from_spec(on_stand_ins))
    found = liger.rotate_row(query, key, rope)
    for mine, other in zip(found, rotate(query, key, rope), strict=True):
        assert torch.equal(mine, other)
