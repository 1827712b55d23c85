"""Supervised steps of a Megatron policy: what they refuse, and what they leave alone.

Their losses and weights are compared with the torch backend's in `test_equal_steps`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fovea.errors import TrainError
from fovea.train.update import TrainedPolicy
from tests.tiny_models import save, tiny
from tests.train.megatron.equal_steps import SIZES, megatron_policy, mixed_pairs

PARTS = tiny("qwen3_vl", **SIZES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(PARTS, tmp_path_factory.mktemp("model"))


def weights_of(policy: TrainedPolicy) -> dict[str, Tensor]:
    return {weight.name: weight.tensor().clone() for weight in policy.weights_to_sync()}


def test_a_banned_token_in_an_answer_is_refused_before_the_step(model: Path) -> None:
    banned = PARTS.processor.banned_ids[0]
    pairs = mixed_pairs(PARTS)
    with megatron_policy(model) as policy:
        before = weights_of(policy)
        with pytest.raises(TrainError, match=f"an answer of the warm-up holds token id {banned}, which completions"):
            policy.sft([*pairs, replace(pairs[0], answer_ids=(5, banned))])
        after = weights_of(policy)
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_a_loss_that_is_no_number_stops_the_warm_up(model: Path) -> None:
    with megatron_policy(model) as policy:
        with torch.no_grad():
            next(policy._model.module.parameters()).fill_(torch.nan)
        with pytest.raises(TrainError, match=r"the loss is nan at warm-up step 1; lower warmup\.learning_rate"):
            policy.sft(mixed_pairs(PARTS))


@pytest.mark.parametrize(
    ("settings", "still"),
    [
        ({}, ()),
        ({"freeze_vision_tower": True}, ("model.visual.",)),
        (
            {"freeze_vision_tower": True, "freeze_projector": False},
            ("model.visual.patch_embed.", "model.visual.pos_embed.", "model.visual.blocks."),
        ),
        (
            {"freeze_vision_tower": False, "freeze_projector": True},
            ("model.visual.merger.", "model.visual.deepstack_merger_list."),
        ),
    ],
    ids=["none", "both", "tower", "projector"],
)
def test_what_is_frozen_stays_as_it_was(settings: dict[str, bool], still: tuple[str, ...], model: Path) -> None:
    with megatron_policy(model, model=settings) as policy:
        before = weights_of(policy)
        policy.sft(mixed_pairs(PARTS))
        after = weights_of(policy)
    unmoved = {name for name, weight in before.items() if torch.equal(after[name], weight)}
    assert unmoved == {name for name in before if name.startswith(still)}


def test_rl_goes_on_from_its_weights_in_16_bits(model: Path) -> None:
    """The optimizer of RL has float32 its own copies, which are older."""
    with megatron_policy(model, model={"dtype": "bfloat16"}) as policy:
        policy.sft(mixed_pairs(PARTS))
        policy.snapshot_reference()
        before = weights_of(policy)
        policy._optimizer.set_rate(0)
        policy._optimizer.zero_grad()
        policy._optimizer.step()
        after = weights_of(policy)
    assert all(torch.equal(after[name], weight) for name, weight in before.items() if weight.dim() == 1)
    furthest = max(float((after[name].float() - weight.float()).abs().max()) for name, weight in before.items())
    assert furthest < 1e-3, furthest


def test_its_optimizer_is_freed_behind_it(model: Path) -> None:
    with megatron_policy(model) as policy:
        policy.sft(mixed_pairs(PARTS))
        policy.snapshot_reference()
        assert policy._sft is None
