"""Calls that are forwarded to the processes of a policy, and a step cut over two real ones: the gradient of one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fovea.algorithms.aggregation import sample_weights
from fovea.cluster.services import WorkersPolicy
from fovea.config.algorithm import Algorithm, Critic, Gae, KlInLoss
from fovea.models.tiny import TinyParts
from fovea.models.trainable import trainable_parameters
from fovea.samples import replace_samples, with_old_logprobs, with_reference_logprobs
from fovea.train.base import CALLS, Policy
from fovea.train.local import LocalPolicy
from fovea.train.torch.policy import TorchPolicy
from fovea.train.update import TrainedPolicy
from fovea.types import Batch
from tests.policies import gradients_and_metrics, make_batch, make_policy, ppo_policy, scored
from tests.process_ranks import run_group
from tests.reference import largest_relative_difference
from tests.tiny_models import tiny


def test_each_call_is_a_method_of_a_process_with_the_same_signature() -> None:
    assert {"compute_logprobs", "update", "save", "export"} <= CALLS
    for name in CALLS:
        assert inspect.signature(getattr(TrainedPolicy, name)) == inspect.signature(getattr(Policy, name)), name


@pytest.mark.parametrize("forwards", [LocalPolicy, WorkersPolicy])
def test_what_a_forwarder_writes_out_has_the_signature_of_the_policy(forwards: type) -> None:
    written = vars(forwards).keys() & {*CALLS, "describe", "close"}
    assert len(written) > 2
    for name in written:
        ours, asked = (list(inspect.signature(getattr(each, name)).parameters) for each in (forwards, Policy))
        assert ours == asked, name


@pytest.mark.parametrize("forwards", [LocalPolicy, lambda policy: WorkersPolicy(policy, cast(Any, None))])
def test_nothing_else_is_forwarded(forwards: Any) -> None:
    for name in ("logprobs", "_optimizers", "weights_to_sync", "sfft"):
        with pytest.raises(AttributeError, match=f"a policy has no call {name}"):
            getattr(forwards(cast(Any, None)), name)


TOLERANCE = 1e-6
GRPO = Algorithm(entropy_coef=0.1, kl=KlInLoss(coef=0.05), aggregation="seq-mean-token-mean")
PPO = Algorithm(name="ppo", ppo_epochs=1, entropy_coef=0.1, advantage=Gae(critic=Critic(value_clip=0.1)))
Result = dict[str, Tensor]


def double() -> TinyParts:
    """In float64, so that the tolerance is for what is float32 by itself: the loss, and the summed gradients."""
    parts = tiny("qwen3_vl")
    for parameter in parts.network.parameters():
        parameter.data = parameter.data.double()
    return parts


POLICIES: dict[str, Callable[[], TorchPolicy]] = {
    "grpo": lambda: make_policy(double(), algorithm=GRPO),
    "ppo": lambda: ppo_policy(double(), algorithm=PPO),  # the trunk is shared
}
CUTS = {"two and two": 2, "one and three": 1}
"""How many groups the first one_of_two has; of one without an image the vision tower gets no gradient."""


def step_of(name: str) -> Batch:
    """Four groups whose policy, reference and values are some way off, so that clips take hold and KLs pull."""
    parts, policy, rng = tiny("qwen3_vl"), POLICIES[name](), np.random.default_rng(0)
    first, second = make_batch(parts), make_batch(parts, seed=1)
    batch = Batch(groups=(first.groups[2], *first.groups[:2], second.groups[1]))
    lengths = [len(sample.token_ids_T) for sample in batch.samples]
    weights = iter(sample_weights(GRPO.aggregation, lengths, max_response_tokens=16))
    batch = replace_samples(batch, lambda sample: replace(sample, weight=float(next(weights))))

    def off(x_T: np.ndarray) -> np.ndarray:
        return x_T + rng.normal(0, 0.3, len(x_T)).astype(np.float32)

    if name == "ppo":
        batch = scored(policy, batch, PPO)
        return replace_samples(
            batch, lambda s: replace(s, values_T=off(s.values_T), old_logprobs_T=off(s.old_logprobs_T))
        )
    logprobs = policy.logprobs(batch)
    batch = with_old_logprobs(batch, [off(x_T) for x_T in logprobs])
    return with_reference_logprobs(batch, [off(x_T) for x_T in logprobs])


def result_of(name: str, groups: Batch) -> Result:
    """The loss and every gradient of these groups, zero where there is none."""
    policy = POLICIES[name]()
    found, metrics = gradients_and_metrics(policy, groups)
    parameters = trainable_parameters(policy.vlm)
    zeros = {key: torch.zeros_like(x, dtype=torch.float32) for key, x in parameters.items()}
    assert found.keys() <= zeros.keys()
    return zeros | found | {"loss": torch.tensor(metrics["loss"])}


def one_of_two(rank: int, steps: dict[str, Batch], summed_by_two: Path) -> None:
    """One of two: its part of every step, and the sum with the other's."""
    for name, step in steps.items():
        for cut, first in CUTS.items():
            mine = step.groups[first:] if rank else step.groups[:first]
            summed = result_of(name, replace(step, groups=mine))
            for value in summed.values():
                dist.all_reduce(value)
            torch.save(summed, summed_by_two / f"{name} {cut} {rank}")


@pytest.fixture(scope="module")
def steps() -> dict[str, Batch]:
    return {name: step_of(name) for name in POLICIES}


@pytest.fixture(scope="module")
def summed_by_two(steps: dict[str, Batch], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes left behind, which are started once for all steps and cuts."""
    summed_by_two = tmp_path_factory.mktemp("processes")
    run_group(one_of_two, steps, summed_by_two)
    return summed_by_two


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", POLICIES)
def test_two_processes_have_the_loss_and_gradient_of_one(
    name: str, cut: str, steps: dict[str, Batch], summed_by_two: Path
) -> None:
    expected = result_of(name, steps[name])
    for rank in range(2):
        summed: Result = torch.load(summed_by_two / f"{name} {cut} {rank}")
        assert largest_relative_difference(expected, summed) < TOLERANCE
