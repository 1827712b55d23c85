"""Sums of bfloat16 gradients over many micro-batches: those of float32."""

from __future__ import annotations

import pytest
import torch

from fovea.train.torch.policy import TorchPolicy
from fovea.types import Batch
from tests.policies import accumulate, make_policy, many_groups
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


def gradients_of_step(
    policy: TorchPolicy, batch: Batch, metrics: dict[str, float] | None = None
) -> dict[str, torch.Tensor]:
    """What the optimizer steps on; the figures of the update go into `metrics`."""
    found: dict[str, torch.Tensor] = {}
    masters = policy._optimizer.masters.by_name
    policy._optimizer.adamw.register_step_pre_hook(
        lambda *_: found.update({name: x.grad.clone() for name, x in masters.items() if x.grad is not None})
    )
    figures = policy.update(batch)
    if metrics is not None:
        metrics |= figures
    return found


def float32_sum(policy: TorchPolicy, batch: Batch) -> dict[str, torch.Tensor]:
    """The gradients of each micro-batch only, added up in float32."""
    total: dict[str, torch.Tensor] = {}
    for group in batch.groups:
        policy._optimizer.zero_grad()
        accumulate(policy, [group])
        for name, parameter in policy._optimizer.parameters.items():
            if parameter.grad is not None:
                total[name] = total.get(name, 0) + parameter.grad.float()
    policy._optimizer.zero_grad()
    return total


@pytest.fixture(scope="module")
def expected(batch: Batch) -> dict[str, torch.Tensor]:
    return float32_sum(bfloat16_policy(), batch)


def test_many_micro_batches_add_up_as_in_float32(batch: Batch, expected: dict[str, torch.Tensor]) -> None:
    found = gradients_of_step(bfloat16_policy(), batch)
    assert expected.keys() == found.keys()
    assert {x.dtype for x in found.values()} == {torch.float32}
    assert largest_relative_difference(expected, found) < FLOAT32_ROUNDING


def test_the_norm_and_the_clip_are_of_the_float32_sum(batch: Batch, expected: dict[str, torch.Tensor]) -> None:
    norm = torch.cat([x.flatten() for x in expected.values()]).norm()
    policy, metrics = bfloat16_policy(max_grad_norm=1e-3), {}
    found = gradients_of_step(policy, batch, metrics)
    assert torch.cat([x.flatten() for x in found.values()]).norm() == pytest.approx(1e-3, rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)


def test_there_is_one_gradient_of_each_weight(batch: Batch) -> None:
    """A float32 one, handed from the parameter to its master: no second copy."""
    policy = bfloat16_policy()
    accumulate(policy, batch.groups[:2])
    parameters, masters = policy._optimizer.parameters, policy._optimizer.masters
    before = {name: x.grad.data_ptr() for name, x in parameters.items() if x.grad is not None}
    masters.take_gradients()
    assert {name: x.grad.data_ptr() for name, x in masters.by_name.items() if x.grad is not None} == before
    assert all(parameter.grad is None for parameter in parameters.values())
