"""Megatron policies in one process: warm-up, adapters, an offloaded optimizer; `test_equal_steps` has their steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fovea.errors import TrainError
from fovea.models.load import load_network
from fovea.models.trainable import choose_trainable, factored_weights
from fovea.train.update import TrainedPolicy
from tests.policies import weights_of
from tests.tiny_models import save, tiny
from tests.train.megatron.equal_steps import SIZES, megatron_policy, mixed_pairs, run_steps, settings_of

PARTS = tiny("qwen3_vl", **SIZES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(PARTS, tmp_path_factory.mktemp("model"))


def copied_weights(policy: TrainedPolicy) -> dict[str, Tensor]:
    return {weight.name: weight.tensor().clone() for weight in policy.weights_to_sync()}


def test_a_banned_token_in_an_answer_is_refused_before_the_step(model: Path) -> None:
    banned = PARTS.processor.banned_ids[0]
    pairs = mixed_pairs(PARTS)
    with megatron_policy(model) as policy:
        before = copied_weights(policy)
        with pytest.raises(TrainError, match=f"warm-up holds token id {banned}, which is never sampled"):
            policy.sft([*pairs, replace(pairs[0], answer_ids=(5, banned))])
        after = copied_weights(policy)
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_a_loss_that_is_no_number_stops_the_warm_up(model: Path) -> None:
    with megatron_policy(model) as policy:
        with torch.no_grad():
            next(policy._model.module.parameters()).fill_(torch.nan)
        with pytest.raises(TrainError, match=r"the loss is nan at warm-up step 1; lower warmup\.learning_rate"):
            policy.sft(mixed_pairs(PARTS))


TOWER = ("model.visual.patch_embed.", "model.visual.pos_embed.", "model.visual.blocks.")
PROJECTOR = ("model.visual.merger.", "model.visual.deepstack_merger_list.")


@pytest.mark.parametrize(
    ("settings", "still"),
    [
        ({}, ()),
        ({"freeze_vision_tower": True}, ("model.visual.",)),
        ({"freeze_vision_tower": True, "freeze_projector": False}, TOWER),
        ({"freeze_vision_tower": False, "freeze_projector": True}, PROJECTOR),
    ],
    ids=["none", "both", "tower", "projector"],
)
def test_what_is_frozen_stays_as_it_was(settings: dict[str, bool], still: tuple[str, ...], model: Path) -> None:
    with megatron_policy(model, model=settings) as policy:
        before = copied_weights(policy)
        policy.sft(mixed_pairs(PARTS))
        after = copied_weights(policy)
    unmoved = {name for name, weight in before.items() if torch.equal(after[name], weight)}
    assert unmoved == {name for name in before if name.startswith(still)}


def test_rl_goes_on_from_its_weights_in_16_bits(model: Path) -> None:
    """The optimizer of RL has float32 its own copies, which are older."""
    with megatron_policy(model, model={"dtype": "bfloat16"}) as policy:
        policy.sft(mixed_pairs(PARTS))
        policy.snapshot_reference()
        before = copied_weights(policy)
        policy._optimizer.set_rate(0)
        policy._optimizer.zero_grad()
        policy._optimizer.step()
        after = copied_weights(policy)
    assert all(torch.equal(after[name], weight) for name, weight in before.items() if weight.dim() == 1)
    furthest = max(float((after[name].float() - weight.float()).abs().max()) for name, weight in before.items())
    assert furthest < 1e-3, furthest


def test_its_optimizer_is_freed_behind_it(model: Path) -> None:
    with megatron_policy(model) as policy:
        policy.sft(mixed_pairs(PARTS))
        policy.snapshot_reference()
        assert policy._sft is None


def with_adapters(module: Any) -> set[str]:
    """Those of Megatron's layers that have some."""
    names = [name for name, _ in module.named_modules() if name.endswith(".adapter")]
    return {name.split(".", 4)[-1].rpartition(".")[0] for name in names}


def test_a_step_moves_what_the_torch_backend_trains(model: Path) -> None:
    given = {"lora": {"rank": 4, "exclude": ["k_proj"]}}
    config = settings_of(model, model=dict(given))
    network = load_network(config.model)
    choose_trainable(network, config.model, config.seed)
    trained = {name for name, weight in factored_weights(network) if weight.requires_grad}
    with megatron_policy(model, model=given) as policy:  # type: ignore[arg-type]
        before = {name: weight.detach().clone() for name, weight in weights_of(policy).items()}
        for _ in range(2):  # the first step moves one of the two matrices only
            policy.sft(mixed_pairs(PARTS))
        after = weights_of(policy)
        assert {weight.name for weight in policy.weights_to_sync() if weight.is_trained} == trained
    assert {name for name, weight in before.items() if not torch.equal(after[name], weight)} == trained


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({"exclude": ["mlp"]}, {"self_attention.linear_qkv", "self_attention.linear_proj"}),
        ({"targets": ["v_proj"]}, {"self_attention.linear_qkv"}),
        ({"targets": ["down_proj", "up_proj"]}, {"mlp.linear_fc1", "mlp.linear_fc2"}),
    ],
)
def test_layers_that_are_left_out_have_none(settings: dict[str, list[str]], layers: set[str], model: Path) -> None:
    with megatron_policy(model, model={"lora": settings}) as policy:  # type: ignore[dict-item]
        assert with_adapters(policy._model.module) == layers


def states_of(policy: TrainedPolicy) -> list[torch.Tensor]:
    return list(policy._optimizer.states())


def steps(policy: TrainedPolicy, folder: Path, *numbers: int) -> Any:
    return run_steps(policy, PARTS, settings_of(folder).algorithm, numbers)


@pytest.mark.parametrize(("dtype", "tensors_of_a_weight"), [("float32", 2), ("bfloat16", 3)])
def test_offloading_changes_no_bit(dtype: str, tensors_of_a_weight: int, model: Path, tmp_path: Path) -> None:
    """With the supervised steps, whose optimizer is offloaded as well; float32 weights are the model's own."""
    of_type: dict[str, Any] = {"model": {"dtype": dtype}}
    with megatron_policy(model, **of_type) as policy:
        expected = steps(policy, model, 0, 1)
        num_weights = sum(parameter.requires_grad for parameter in policy._training.parameters())
        after = steps(policy, model, 2)
    with megatron_policy(model, **of_type, optimizer_offload=True) as policy:
        found, states = steps(policy, model, 0, 1), states_of(policy)
        assert len(states) == tensors_of_a_weight * num_weights
        assert all(state.numel() > 0 and state.untyped_storage().nbytes() == 0 for state in states)
        policy.save(tmp_path)
        policy.finish_save()
    with megatron_policy(model, **of_type, optimizer_offload=True) as policy:
        policy.load(tmp_path)
        assert all(state.untyped_storage().nbytes() == 0 for state in states_of(policy))
        resumed = steps(policy, model, 2)
    for ours, theirs in ((found, expected), (resumed, after)):
        assert ours.metrics == theirs.metrics
        assert all(torch.equal(ours.weights[name], weight) for name, weight in theirs.weights.items())
