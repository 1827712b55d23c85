"""Sums of bfloat16 gradients over many micro-batches: those of float32."""

from __future__ import annotations

import pytest
import torch

from fovea.models.trainable import trainable_parameters
from fovea.train.torch.optimizer import MasterWeights
from fovea.train.torch.policy import TorchPolicy
from fovea.types import Batch
from tests.policies import flat_weights, gradients_and_metrics, make_policy, many_groups, update_gradients
from tests.reference import largest_relative_difference
from tests.tiny_models import tiny

NUM_GROUPS = 66
"""And as many micro-batches."""
FLOAT32_ROUNDING = 1e-5


def bfloat16_policy(**train: object) -> TorchPolicy:
    parts = tiny("qwen3_vl")
    parts.network.bfloat16()
    return make_policy(parts, temperature=1.0, enable_dynamic_batch_size=False, lr_warmup_steps=0, **train)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return many_groups(NUM_GROUPS)


@pytest.fixture(scope="module")
def expected(batch: Batch) -> dict[str, torch.Tensor]:
    """The gradients of each micro-batch only, in updates that move no weight, added up in float32."""
    total: dict[str, torch.Tensor] = {}
    policy = bfloat16_policy(learning_rate=1e-60)
    before = flat_weights(policy)
    for group in batch.groups:
        for name, gradient in update_gradients(policy, Batch(groups=(group,))).items():
            total[name] = total.get(name, 0) + gradient
    assert torch.equal(flat_weights(policy), before)
    return total


def test_many_micro_batches_add_up_as_in_float32(batch: Batch, expected: dict[str, torch.Tensor]) -> None:
    found = update_gradients(bfloat16_policy(), batch)
    assert expected.keys() == found.keys()
    assert {x.dtype for x in found.values()} == {torch.float32}
    assert largest_relative_difference(expected, found) < FLOAT32_ROUNDING


def test_the_norm_and_the_clip_are_of_the_float32_sum(batch: Batch, expected: dict[str, torch.Tensor]) -> None:
    norm = torch.cat([x.flatten() for x in expected.values()]).norm()
    found, metrics = gradients_and_metrics(bfloat16_policy(max_grad_norm=1e-3), batch)
    assert torch.cat([x.flatten() for x in found.values()]).norm() == pytest.approx(1e-3, rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)


def test_there_is_one_gradient_of_each_weight(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 one, handed from the parameter to its master: no second copy."""
    taken, take = list[MasterWeights](), MasterWeights.take_gradients
    policy = bfloat16_policy()
    parameters = trainable_parameters(policy.vlm)

    def checked(masters: MasterWeights) -> None:
        before = {name: x.grad.data_ptr() for name, x in parameters.items() if x.grad is not None}
        take(masters)
        assert {name: x.grad.data_ptr() for name, x in masters.by_name.items() if x.grad is not None} == before
        assert all(parameter.grad is None for parameter in parameters.values())
        taken.append(masters)

    monkeypatch.setattr(MasterWeights, "take_gradients", checked)
    policy.update(Batch(groups=batch.groups[:2]))
    assert len(taken) == 1
