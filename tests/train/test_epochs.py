"""Epochs of an update: their old log-probs, their minibatches, and how many of them were run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from fovea.config.algorithm import Algorithm
from fovea.samples import with_old_logprobs
from fovea.train.microbatches import MicroBatcher
from fovea.train.packing import MicroBatch
from fovea.train.schedule import UpdatePasses
from fovea.train.torch.policy import TorchPolicy
from fovea.train.update_metrics import UpdateStats
from fovea.types import Batch, Metrics, SampleGroup
from tests.policies import count_passes, flat_weights, make_batch, make_policy
from tests.tiny_models import tiny

TRAIN = {"lr_warmup_steps": 0, "max_tokens_per_microbatch": 300}
EPOCHS = 3


def policy_of_epochs(**algorithm: object) -> TorchPolicy:
    settings = Algorithm.model_validate({"ppo_epochs": EPOCHS, **algorithm})
    return make_policy(tiny("qwen3_vl"), algorithm=settings, **TRAIN)


def update(with_pass: bool, **algorithm: object) -> tuple[torch.Tensor, Metrics, int]:
    policy = policy_of_epochs(**algorithm)
    batch = make_batch(tiny("qwen3_vl"))
    passes = count_passes(policy)
    if with_pass:
        batch = with_old_logprobs(batch, policy.logprobs(batch))
    metrics = policy.update(batch)
    return flat_weights(policy), metrics, len(passes)


@pytest.mark.parametrize("clip", [0.2, 0.001])
def test_the_first_epoch_stands_in_for_a_pass_of_its_own(clip: float) -> None:
    """Also where later epochs clip, which the old log-probs decide."""
    weights, metrics, passes = update(False, loss={"name": "clip", "clip_low": clip, "clip_high": clip})
    expected_weights, expected_metrics, expected_passes = update(
        True, loss={"name": "clip", "clip_low": clip, "clip_high": clip}
    )
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=0)
    assert metrics == pytest.approx(expected_metrics, abs=1e-6, rel=1e-5)
    assert metrics["clip_frac/low"] + metrics["clip_frac/high"] > 0
    rows = 2
    assert (passes, expected_passes) == (3 * rows, 4 * rows)


def test_later_epochs_are_off_policy() -> None:
    """Each epoch its own old policy would leave every ratio at 1."""
    _, metrics, _ = update(False)
    assert abs(metrics["ratio_mean"] - 1) > 1e-4


def test_the_batch_that_was_handed_in_stays_as_it_was() -> None:
    policy, batch = (policy_of_epochs(), make_batch(tiny("qwen3_vl")))
    policy.update(batch)
    assert all(sample.old_logprobs_T is None for group in batch.groups for sample in group.samples)


def test_a_batch_without_groups_takes_no_epoch() -> None:
    empty: Batch = replace(make_batch(tiny("qwen3_vl")), groups=())
    assert policy_of_epochs().update(empty)["actions_trained"] == 0


@pytest.mark.parametrize("settings", [{}, {"minibatches": 3}], ids=str)
def test_log_probs_of_a_pass_before_the_update_are_compared_with_the_engines(settings: dict[str, int]) -> None:
    """Not those of the first epoch, which are of other weights from its second minibatch on."""
    policy, batch = policy_of_epochs(**settings), make_batch(tiny("qwen3_vl"))
    given = [logprobs_T - 1 for logprobs_T in policy.logprobs(batch)]
    found = policy.update(with_old_logprobs(batch, given))["mismatch_trained/k1"]
    engines = np.concatenate([sample.rollout_logprobs_T for sample in batch.samples])
    assert found == pytest.approx(float((engines - np.concatenate(given)).mean()), rel=1e-5)


def test_log_probs_of_several_minibatches_are_not_compared_with_the_engines() -> None:
    policy, batch = policy_of_epochs(minibatches=3, old_logprobs="engine"), make_batch(tiny("qwen3_vl"))
    metrics = policy.update(with_old_logprobs(batch, policy.logprobs(batch)))
    assert not any(name.startswith("mismatch") for name in metrics)


def test_old_log_probs_of_the_engine_stay_so_in_later_epochs() -> None:
    """A rate at which the policy hardly moves, so that every epoch measures the engine's .3 nats."""
    algorithm = Algorithm(ppo_epochs=EPOCHS, old_logprobs="engine")
    policy = make_policy(tiny("qwen3_vl"), algorithm=algorithm, learning_rate=1e-6)
    batch = make_batch(tiny("qwen3_vl"))
    off = [logprobs_T - 0.3 for logprobs_T in policy.logprobs(batch)]
    assert policy.update(with_old_logprobs(batch, off))["ratio_mean"] == pytest.approx(np.exp(0.3), rel=1e-2)


def test_no_pass_follows_the_one_that_ends_an_update() -> None:
    policy = policy_of_epochs(max_policy_kl=1e-9)
    passes = count_passes(policy)
    policy.update(make_batch(tiny("qwen3_vl")))
    rows = 2
    assert len(passes) == 2 * rows, "a third epoch would find the same"


def test_each_epoch_has_minibatches_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the schedule, which the images of a step are handed out by."""
    policy, batch = policy_of_epochs(minibatches=3), make_batch(tiny("qwen3_vl"))
    batch = with_old_logprobs(batch, policy.logprobs(batch))
    taken: list[Sequence[SampleGroup]] = []
    pack = MicroBatcher.micro_batches

    def noted(
        batcher: MicroBatcher, groups: Sequence[SampleGroup], only: SampleGroup | None = None
    ) -> list[MicroBatch]:
        taken.extend([groups] if groups else [])
        return pack(batcher, groups, only)

    monkeypatch.setattr(MicroBatcher, "micro_batches", noted)
    policy.update(batch)
    algorithm = Algorithm(ppo_epochs=EPOCHS, minibatches=3)
    schedule = UpdatePasses(algorithm=algorithm, plain_update_every_steps=20, step=0)
    epochs = [schedule.minibatches(epoch, batch.groups) for epoch in range(EPOCHS)]
    assert taken == [groups for minibatches in epochs for groups in minibatches]
    assert epochs[0] != epochs[1]


def test_losses_are_means_over_passes_and_the_rest_over_actions() -> None:
    """Two passes over 4 and 2 actions; `entropy` is a sum over actions, the loss is weighted already."""
    stats = UpdateStats()
    stats.add({"loss": 0.6, "policy_loss": 0.4, "entropy": 8.0, "actions": 4.0, "reused_images": 1.0}, 0.01)
    stats.add({"loss": 0.2, "policy_loss": 0.0, "entropy": 1.0, "actions": 2.0, "reused_images": 2.0}, 0.02)
    stats.norms.append([1.0])
    metrics = stats.metrics()
    assert (metrics["loss"], metrics["policy_loss"]) == (pytest.approx(0.4), pytest.approx(0.2))
    assert metrics["entropy"] == 1.5
    assert (metrics["actions_trained"], metrics["reused_images"], metrics["kl/policy"]) == (6.0, 3.0, 0.02)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 1),
        ({"ppo_epochs": 2}, 2),
        ({"minibatches": 3}, 1),
        ({"ppo_epochs": 2, "minibatches": 3}, 2),
        ({"ppo_epochs": 2, "minibatches": 9}, 2),  # of 3 groups there are 3
        ({"ppo_epochs": 3, "minibatches": 2, "max_policy_kl": 1e-9}, 1 / 2),  # the first step has moved the policy
    ],
    ids=str,
)
def test_optimizer_steps_count_in_passes_over_the_batch(settings: dict[str, object], expected: float) -> None:
    parts = tiny("qwen3_vl")
    policy = make_policy(parts, algorithm=Algorithm.model_validate(settings), lr_warmup_steps=0)
    batch = make_batch(parts)
    batch = with_old_logprobs(batch, policy.logprobs(batch))
    assert policy.update(batch)["epochs_run"] == pytest.approx(expected)


def test_old_logprobs_of_a_stale_engine_do_not_end_an_update_before_its_first_step() -> None:
    """.3 nats off, k3 is above the limit at once; by how much the update moves the policy is not known yet."""
    parts = tiny("qwen3_vl")
    algorithm = Algorithm(old_logprobs="engine", ppo_epochs=2, max_policy_kl=0.01)
    policy = make_policy(parts, algorithm=algorithm, lr_warmup_steps=0)
    batch = make_batch(parts)
    batch = with_old_logprobs(batch, [logprobs_T - 0.3 for logprobs_T in policy.logprobs(batch)])
    metrics = policy.update(batch)
    assert metrics["kl/policy"] > 0.01
    assert metrics["epochs_run"] == 1
