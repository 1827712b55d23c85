"""The engine against the trainer: all action tokens of a step, also those that no gradient comes from."""

from __future__ import annotations

from dataclasses import replace
from math import exp

import numpy as np
import pytest

from fovea.config.algorithm import Algorithm
from fovea.models.tiny import TinyParts
from fovea.train.schedule import UpdatePasses
from fovea.train.torch.policy import TorchPolicy
from fovea.train.update_metrics import mismatch
from fovea.types import Batch, Metrics, SampleGroup
from tests.policies import make_batch, make_policy
from tests.records import PROMPT, floats, sample_of
from tests.reference import reference_logprobs
from tests.tiny_models import tiny

TRAINED = "mismatch_trained/kl"


def split(batch: Batch) -> Batch:
    """The last group has nothing to teach."""
    return replace(batch, groups=batch.groups[:2], left_out=batch.groups[2:])


def differences(parts: TinyParts, groups: tuple[SampleGroup, ...]) -> np.ndarray:
    """The engine's log-probs less transformers' of the same tokens."""
    rows = [
        sample.rollout_logprobs_T
        - reference_logprobs(parts, group.prompt, sample.token_ids_T, temperature=0.9).detach().numpy()
        for group in groups
        for sample in group.samples
    ]
    return np.concatenate(rows)


def k3(difference: np.ndarray) -> float:
    return float(np.mean(np.exp(-difference) + difference - 1))


def updates(policy: TorchPolicy, batch: Batch, count: int) -> list[Metrics]:
    return [policy.update(batch) for _ in range(count)]


def test_a_step_is_compared_in_all_its_tokens() -> None:
    parts, batch = tiny("qwen3_vl"), split(make_batch(tiny("qwen3_vl")))
    every, some = differences(parts, (*batch.groups, *batch.left_out)), differences(parts, batch.groups)
    metrics = make_policy(parts).update(batch)
    assert metrics["mismatch/k1"] == pytest.approx(every.mean(), rel=1e-4)
    assert metrics["mismatch/kl"] == pytest.approx(k3(every), rel=1e-4)
    assert metrics["mismatch/abs"] == pytest.approx(np.abs(every).mean(), rel=1e-4)
    assert metrics["mismatch/max"] == pytest.approx(np.abs(every).max(), rel=1e-4)
    assert metrics[TRAINED] == pytest.approx(k3(some), rel=1e-4) != metrics["mismatch/kl"]
    assert metrics["mismatch_trained/abs"] == pytest.approx(np.abs(some).mean(), rel=1e-4)


def test_a_step_without_any_signal_is_compared_too() -> None:
    batch = make_batch(tiny("qwen3_vl"))
    metrics = make_policy(tiny("qwen3_vl")).update(Batch(groups=(), left_out=batch.groups))
    assert metrics["actions_trained"] == 0
    assert metrics["mismatch/abs"] > 0


def test_between_plain_steps_only_what_is_scored_anyway_is_compared() -> None:
    batch = make_batch(tiny("qwen3_vl"))
    policy = make_policy(tiny("qwen3_vl"), plain_update_every_steps=2)
    first, second, third = updates(policy, split(batch), 3)
    assert ["mismatch/kl" in metrics for metrics in (first, second, third)] == [True, False, True]
    assert all(TRAINED in metrics for metrics in (first, second, third))
    assert "mismatch/kl" in policy.update(batch), "nothing was left out, so that all log-probs are at hand"


def test_later_epochs_cut_the_step_into_other_minibatches() -> None:
    """And the same ones in a run that is resumed at that step."""
    batch = make_batch(tiny("qwen3_vl"))
    named = [replace(group, task_id=f"row {number}") for number, group in enumerate(batch.groups * 4)]
    algorithm = Algorithm(ppo_epochs=3, minibatches=4)
    orders = []
    for _ in range(2):
        schedule = UpdatePasses(algorithm=algorithm, plain_update_every_steps=1, step=4)
        minibatches = [schedule.minibatches(epoch, named) for epoch in range(3)]
        orders.append([[group.task_id for groups in of_epoch for group in groups] for of_epoch in minibatches])
    assert orders[0] == orders[1]
    first, second, third = orders[0]
    assert first == [group.task_id for group in named]
    assert sorted(first) == sorted(second) == sorted(third)
    assert len({tuple(order) for order in orders[0]}) == 3


def group(*rollout: np.ndarray) -> SampleGroup:
    samples = (sample_of(range(len(x)), rollout_logprobs_T=x) for x in rollout)
    return SampleGroup(prompt=PROMPT, samples=tuple(samples))


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_by_hand(sign: int) -> None:
    """lp - lp_old is 0.5, -2 and 0.3 (or all the other way): the largest of either sign counts."""
    off = [sign * 0.5, sign * -2.0, sign * 0.3]
    old = [floats(-1, -3), floats(-2)]
    found = mismatch([group(floats(-1 + off[0], -3 + off[1])), group(floats(-2 + off[2]))], old)
    assert found == pytest.approx(
        {
            "mismatch/k1": sign * -1.2 / 3,
            "mismatch/kl": sum(exp(-x) + x - 1 for x in off) / 3,
            "mismatch/abs": 2.8 / 3,
            "mismatch/max": 2.0,
        },
        rel=1e-5,
    )


def test_of_no_groups_there_is_nothing_to_say() -> None:
    assert mismatch([], []) == {}
