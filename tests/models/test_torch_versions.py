"""Code for the oldest torch, run on the torch that is installed, against the code for newer ones."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fovea.models import torch_versions
from fovea.models.token_logprobs import TokenScores
from fovea.models.torch_versions import CHECKPOINT_OPTIONS, selective_contexts, shared_keys

MM = torch.ops.aten.mm.default


def kept_shapes() -> tuple[list[torch.Size], torch.Tensor]:
    """Shapes of the products that a checkpointed pass noted, and the gradient of its input."""
    shapes: list[torch.Size] = []
    x = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
    layer = lambda x: ((x @ torch.ones(3, 5)).tanh() @ torch.ones(5, 4)).sin()  # noqa: E731
    out = checkpoint(
        layer, x, **CHECKPOINT_OPTIONS, context_fn=lambda: selective_contexts({MM}, lambda y: shapes.append(y.shape))
    )
    out.sum().backward()
    assert x.grad is not None
    return shapes, x.grad


def test_kept_outputs_are_noted_once_by_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [torch.Size([2, 5]), torch.Size([2, 4])]
    shapes, gradient = kept_shapes()
    assert shapes == expected
    monkeypatch.setattr(torch_versions, "PASSES_OUTPUTS", False)
    shapes, same = kept_shapes()
    assert shapes == expected
    assert torch.equal(same, gradient)


def test_shared_keys_are_named_where_torch_has_a_name_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    four, two = torch.zeros(3, 4, 8), torch.zeros(3, 2, 8)
    monkeypatch.setattr(torch_versions, "NAMES_SHARED_KEYS", True)
    assert shared_keys(four, two) == {"enable_gqa": True}
    assert shared_keys(four, four) == {"enable_gqa": False}
    monkeypatch.setattr(torch_versions, "NAMES_SHARED_KEYS", False)
    assert shared_keys(four, two) == {}


def test_fsdp_finds_the_tensors_of_a_policys_output() -> None:
    """Torch 2.11 looks for them by `tree_leaves`; `tests/train/test_ranks.py` trains so."""
    one, two, three = (torch.zeros(n) for n in (1, 2, 3))
    scores = TokenScores(logprobs_A=one, entropies_A=two, banned_mass_A=three)
    assert [leaf.shape for leaf in tree_leaves(scores) if leaf is not None] == [(1,), (2,), (3,)]
