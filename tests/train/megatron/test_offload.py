"""An optimizer whose state is in the host's memory between its steps: the steps of one that has it at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fovea.train.update import TrainedPolicy
from tests.tiny_models import save, tiny
from tests.train.megatron.equal_steps import SIZES, megatron_policy, run_steps, settings_of

FAMILY = "qwen3_vl"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny(FAMILY, **SIZES), tmp_path_factory.mktemp("model"))


def states_of(policy: TrainedPolicy) -> list[torch.Tensor]:
    return list(policy._optimizer.states())


def steps(policy: TrainedPolicy, folder: Path, *numbers: int) -> Any:
    return run_steps(policy, tiny(FAMILY, **SIZES), settings_of(folder).algorithm, numbers)


@pytest.mark.parametrize(("dtype", "tensors_of_a_weight"), [("float32", 2), ("bfloat16", 3)])
def test_steps_and_checkpoints_are_the_same_bit_by_bit(
    dtype: str, tensors_of_a_weight: int, folder: Path, tmp_path: Path
) -> None:
    """With the supervised steps, whose optimizer is offloaded as well; float32 weights are the model's own."""
    model = {"dtype": dtype}
    with megatron_policy(folder, model=model) as policy:
        expected = steps(policy, folder, 0, 1)
        num_weights = sum(parameter.requires_grad for parameter in policy._training.parameters())
        after = steps(policy, folder, 2)
    with megatron_policy(folder, model=model, optimizer_offload=True) as policy:
        found = steps(policy, folder, 0, 1)
        states = states_of(policy)
        assert len(states) == tensors_of_a_weight * num_weights
        assert all(state.numel() > 0 and state.untyped_storage().nbytes() == 0 for state in states)
        policy.save(tmp_path)
        policy.finish_save()
    with megatron_policy(folder, model=model, optimizer_offload=True) as policy:
        policy.load(tmp_path)
        assert all(state.untyped_storage().nbytes() == 0 for state in states_of(policy))
        resumed = steps(policy, folder, 2)
    for ours, theirs in ((found, expected), (resumed, after)):
        assert ours.metrics == theirs.metrics
        assert all(torch.equal(ours.weights[name], weight) for name, weight in theirs.weights.items())
