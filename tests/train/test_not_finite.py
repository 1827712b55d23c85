"""A step with a loss, value or gradient that is not finite is left out and counted, and names its samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fovea.advantages import with_advantages
from fovea.config.algorithm import Algorithm
from fovea.errors import TrainError
from fovea.models.tiny import TinyParts
from fovea.samples import replace_samples, with_old_logprobs, with_values
from fovea.train.torch.policy import TorchPolicy
from fovea.types import Batch, Sample
from tests.policies import (
    PPO,
    flat_weights,
    logprobs_and_values,
    make_batch,
    make_policy,
    named,
    ppo_policy,
    scored,
    with_advantage,
    with_group,
    with_rewards,
)
from tests.saved import save_policy
from tests.tiny_models import tiny


@pytest.mark.parametrize(
    "train",
    [{}, {"max_tokens_per_microbatch": 100}, {"backend": {"logits_mib": 0.001}}],
    ids=["one row", "rows", "chunks of logits"],
)
def test_a_loss_that_is_not_finite_skips_the_step(train: dict[str, object]) -> None:
    """Cut into several rows, those that are fine do not step either: half a batch is another gradient."""
    policy = make_policy(tiny("qwen3_vl"), lr_warmup_steps=0, **train)
    good = named(make_batch(tiny("qwen3_vl")))
    before = flat_weights(policy)
    metrics = policy.update(with_advantage(good, 1, np.nan))
    assert metrics["updates_skipped"] == 1
    assert torch.equal(flat_weights(policy), before)
    assert policy.update(good)["updates_skipped"] == 0
    assert not torch.equal(flat_weights(policy), before)
    assert flat_weights(policy).isfinite().all()


def test_too_many_in_a_row_stop_the_run_and_name_the_samples() -> None:
    policy = make_policy(tiny("qwen3_vl"), max_skipped_updates=1, max_tokens_per_microbatch=100)
    good = named(make_batch(tiny("qwen3_vl")))
    bad = with_advantage(good, 1, np.inf)
    policy.update(bad)
    policy.update(good)  # the count starts again
    policy.update(bad)
    with pytest.raises(TrainError, match=r"at step 4, as in all of the last 2 updates, with the samples of row 1;"):
        policy.update(bad)


def test_a_gradient_that_is_not_finite_is_traced_to_its_group() -> None:
    """The loss is finite: the gradient overflows on its way back."""
    parts = tiny("qwen3_vl")
    policy = make_policy(parts, max_skipped_updates=0)
    batch = named(make_batch(parts))
    image = next(i for i, group in enumerate(batch.groups) if group.prompt.images)

    def overflow(_: object, gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(g * torch.inf if g is not None else g for g in gradients)

    parts.network.get_submodule("model.visual.merger").register_full_backward_pre_hook(overflow)
    with pytest.raises(TrainError, match=rf"row {image}[,;]") as caught:
        policy.update(batch)
    without_images = [i for i, group in enumerate(batch.groups) if not group.prompt.images]
    assert without_images
    assert all(f"row {i}" not in str(caught.value) for i in without_images)


@pytest.mark.parametrize("algorithm", [{"ppo_epochs": 3}, {"ppo_epochs": 2, "max_policy_kl": 1e-9}], ids=str)
def test_the_rest_of_an_update_is_left_out_too(algorithm: dict[str, float]) -> None:
    """Also under a limit on the KL, which hides nothing."""
    policy = make_policy(tiny("qwen3_vl"), algorithm=Algorithm(**algorithm), max_tokens_per_microbatch=100)
    metrics = policy.update(with_advantage(named(make_batch(tiny("qwen3_vl"))), 0, np.nan))
    assert (metrics["epochs_run"], metrics["updates_skipped"]) == (0, 1)


def test_the_count_is_part_of_a_checkpoint(tmp_path: Path) -> None:
    bad = with_advantage(named(make_batch(tiny("qwen3_vl"))), 0, np.nan)
    first, second = (make_policy(tiny("qwen3_vl"), max_skipped_updates=1) for _ in range(2))
    first.update(bad)
    save_policy(first, tmp_path)
    second.load(tmp_path)
    with pytest.raises(TrainError, match="2 updates"):
        second.update(bad)


def test_an_engine_that_drew_the_impossible_skips_the_step_whether_or_not_the_loss_reads_it() -> None:
    policy = make_policy(tiny("qwen3_vl"), max_skipped_updates=0)
    batch = named(make_batch(tiny("qwen3_vl")))
    first = batch.groups[1].samples[0]
    impossible = replace(first, rollout_logprobs_T=np.full_like(first.rollout_logprobs_T, -np.inf))
    batch = replace_samples(batch, lambda sample: impossible if sample is first else sample)
    before = flat_weights(policy)
    with pytest.raises(TrainError, match="row 1;"):
        policy.update(batch)
    assert torch.equal(flat_weights(policy), before)


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce++"])
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_kl_in_the_reward_that_is_not_finite_is_not_taken_for_a_reward_of_zero(name: str, bad: float) -> None:
    """One token of one sample, to which the reference gives no number."""
    algorithm = Algorithm.model_validate({"name": name, "kl": {"name": "reward", "coef": 0.1}})
    policy = make_policy(tiny("qwen3_vl"), algorithm=algorithm, max_skipped_updates=0)
    batch = named(make_batch(tiny("qwen3_vl")))
    batch = with_old_logprobs(batch, policy.logprobs(batch))
    numbers = iter(range(len(batch.samples)))

    def refer(sample: Sample) -> Sample:
        logprobs_T = np.full_like(sample.old_logprobs_T, bad if next(numbers) == 0 else -1.0)
        return replace(sample, reference_logprobs_T=logprobs_T)

    batch, _ = with_advantages(replace_samples(batch, refer), algorithm, 0.1)
    with pytest.raises(TrainError, match="row 0;"):
        policy.update(batch)


FAR = 1e6


@pytest.fixture
def parts() -> TinyParts:
    return tiny("qwen3_vl")


def bits(policy: TorchPolicy) -> dict[str, bytes]:
    """Of all weights of policy and critic."""
    modules = {"policy": policy.vlm, "value": policy.value_function.model or torch.nn.Identity()}
    named = [(f"{part}.{name}", x) for part, module in modules.items() for name, x in module.state_dict().items()]
    return {name: x.numpy().tobytes() for name, x in named}


def tasks_in(caught: pytest.ExceptionInfo[TrainError]) -> set[str]:
    """That the message names, each once."""
    named = str(caught.value).split("with the samples of ")[1].split(";")[0].split(", ")
    assert len(set(named)) == len(named)
    return set(named)


def advantages_of(policy: TorchPolicy, batch: Batch, value: float = 0.0) -> Batch:
    """As a step makes them, where the critic expects this of the second group, beside what it does expect."""
    logprobs, values = logprobs_and_values(policy, batch)
    batch = with_values(with_old_logprobs(batch, logprobs), values)
    batch = with_group(batch, 1, lambda sample: replace(sample, values_T=sample.values_T + np.float32(value)))
    return with_advantages(batch, PPO, 0.0)[0]


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_critic_that_gives_no_numbers_moves_nothing(value: float, separate: bool, parts: TinyParts) -> None:
    """And stops the run."""
    policy = ppo_policy(parts, separate=separate, max_skipped_updates=1)
    batch = scored(policy, named(make_batch(parts)))
    *_, bias = policy.value_function.optimizer.parameters.values()
    torch.nn.init.constant_(bias, value)
    before = bits(policy)
    assert policy.update(batch)["updates_skipped"] == 1
    with pytest.raises(TrainError, match="2 updates") as caught:
        policy.update(batch)
    assert tasks_in(caught) == {"row 0", "row 1", "row 2"}
    assert bits(policy) == before


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf])
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
def test_a_gradient_of_the_critic_that_is_not_finite_is_traced(separate: bool, parts: TinyParts) -> None:
    """Of a return so far off that the gradient overflows behind the head, which keeps it from a shared trunk."""
    policy = ppo_policy(parts, separate=separate, detach_trunk=not separate, max_skipped_updates=0)
    good = advantages_of(policy, with_rewards(named(make_batch(parts))))
    far = with_group(good, 1, lambda sample: replace(sample, returns_T=sample.returns_T + np.float32(FAR)))
    head = policy.value_function.model.head if separate else policy.vlm.value_head

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
