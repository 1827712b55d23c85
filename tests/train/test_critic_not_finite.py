"""An update whose critic, rewards or critic's gradient are not finite moves neither policy nor critic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from fovea.advantages import with_advantages
from fovea.errors import TrainError
from fovea.models.tiny import TinyParts
from fovea.samples import replace_samples, with_old_logprobs, with_values
from fovea.train.torch.policy import TorchPolicy
from fovea.types import Batch, Sample
from tests.policies import make_batch, named
from tests.tiny_models import tiny
from tests.train.ppo_policies import PPO, logprobs_and_values, ppo_policy, scored, with_rewards

NOT_FINITE = (np.nan, np.inf)
FAR = 1e6


@pytest.fixture
def parts() -> TinyParts:
    return tiny("qwen3_vl")


def bits(policy: TorchPolicy) -> dict[str, bytes]:
    """Of all weights of policy and critic."""
    assert policy._value_function is not None
    modules = {"policy": policy._vlm, "value": policy._value_function.model}
    return {
        f"{part}.{name}": x.numpy().tobytes()
        for part, module in modules.items()
        if module is not None
        for name, x in module.state_dict().items()
    }


def tasks_in(caught: pytest.ExceptionInfo[TrainError]) -> set[str]:
    """That the message names, each once."""
    named = str(caught.value).split("with the samples of ")[1].split(";")[0].split(", ")
    assert len(set(named)) == len(named)
    return set(named)


def with_group(batch: Batch, index: int, change: Callable[[Sample], Sample]) -> Batch:
    """The batch with the samples of one group changed."""
    of_group = set(map(id, batch.groups[index].samples))
    return replace_samples(batch, lambda sample: change(sample) if id(sample) in of_group else sample)


def advantages_of(policy: TorchPolicy, batch: Batch, value: float = 0.0) -> Batch:
    """As a step makes them, where the critic expects this of the second group, beside what it does expect."""
    logprobs, values = logprobs_and_values(policy, batch)
    batch = with_values(with_old_logprobs(batch, logprobs), values)
    batch = with_group(batch, 1, lambda sample: replace(sample, values_T=sample.values_T + np.float32(value)))
    return with_advantages(batch, PPO, 0.0)[0]


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_critic_that_gives_no_numbers_moves_nothing_and_stops_the_run(
    value: float, separate: bool, parts: TinyParts
) -> None:
    policy = ppo_policy(parts, separate=separate, max_skipped_updates=1)
    batch = scored(policy, named(make_batch(parts)))
    assert policy._value_function is not None
    *_, bias = policy._value_function.optimizer.parameters.values()
    torch.nn.init.constant_(bias, value)
    before = bits(policy)
    assert policy.update(batch)["updates_skipped"] == 1
    with pytest.raises(TrainError, match="all of the last 2 updates") as caught:
        policy.update(batch)
    assert tasks_in(caught) == {"row 0", "row 1", "row 2"}
    assert bits(policy) == before


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_task_whose_values_are_not_finite_is_the_one_named(value: float, separate: bool, parts: TinyParts) -> None:
    """Although whitening has made every advantage of the step NaN."""
    policy = ppo_policy(parts, separate=separate, max_skipped_updates=0)
    batch = advantages_of(policy, with_rewards(named(make_batch(parts))), value)
    before = bits(policy)
    with pytest.raises(TrainError) as caught:
        policy.update(batch)
    assert tasks_in(caught) == {"row 1"}
    assert bits(policy) == before


@pytest.mark.parametrize("separate", [False, True])
def test_a_reward_that_is_no_number_skips_one_update_and_no_more(separate: bool, parts: TinyParts) -> None:
    policy = ppo_policy(parts, separate=separate, max_skipped_updates=1)
    good = with_rewards(named(make_batch(parts)))
    bad = advantages_of(policy, with_group(good, 2, lambda sample: replace(sample, reward=np.nan)))
    before = bits(policy)
    for _ in range(2):  # the count begins anew
        metrics = policy.update(bad)
        assert (metrics["updates_skipped"], metrics["epochs_run"]) == (1, 0)
        assert bits(policy) == before
        assert policy.update(advantages_of(policy, good))["updates_skipped"] == 0
        assert bits(policy) != before
        before = bits(policy)
    policy.update(bad)
    with pytest.raises(TrainError) as caught:
        policy.update(bad)
    assert tasks_in(caught) == {"row 2"}


@pytest.mark.parametrize("separate", [False, True])
def test_a_gradient_that_is_not_finite_in_the_critic_alone_is_traced_to_its_group(
    separate: bool, parts: TinyParts
) -> None:
    """Of a return so far off that the gradient overflows behind the head, which keeps it from a shared trunk."""
    policy = ppo_policy(parts, separate=separate, detach_trunk=not separate, max_skipped_updates=0)
    good = advantages_of(policy, with_rewards(named(make_batch(parts))))
    far = with_group(good, 1, lambda sample: replace(sample, returns_T=sample.returns_T + np.float32(FAR)))
    assert policy._value_function is not None
    head = policy._value_function.model.head if policy._value_function.model is not None else policy._vlm.value_head
    assert head is not None

    def overflow(_module: object, _states: object, values: torch.Tensor) -> None:
        if values.requires_grad:
            values.register_hook(lambda gradient: torch.where(gradient.abs() > 1, torch.inf, gradient))

    head.linear.register_forward_hook(overflow)
    before = bits(policy)
    with pytest.raises(TrainError) as caught:
        policy.update(far)
    assert tasks_in(caught) == {"row 1"}
    assert bits(policy) == before
    policy.update(good)
    assert bits(policy) != before
