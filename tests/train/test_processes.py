"""A step cut over two real processes, each with its own groups: summed, the gradient and loss of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fovea.algorithms.aggregation import sample_weights
from fovea.config.algorithm import Algorithm, Critic, Gae, KlInLoss
from fovea.models.tiny import TinyParts
from fovea.models.trainable import trainable_parameters
from fovea.samples import replace_samples, with_old_logprobs, with_reference_logprobs
from fovea.train.torch.policy import TorchPolicy
from fovea.types import Batch
from tests.policies import gradients_and_metrics, make_batch, make_policy
from tests.process_ranks import run_group
from tests.reference import largest_relative_difference
from tests.tiny_models import tiny
from tests.train.ppo_policies import ppo_policy, scored

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


def grpo_policy() -> TorchPolicy:
    return make_policy(double(), algorithm=GRPO)


def shared_trunk_policy() -> TorchPolicy:
    return ppo_policy(double(), algorithm=PPO)


POLICIES: dict[str, Callable[[], TorchPolicy]] = {"grpo": grpo_policy, "ppo": shared_trunk_policy}
CUTS = {"two and two": 2, "one and three": 1}
"""How many groups the first process has; of one without an image the vision tower gets no gradient."""


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


def process(rank: int, steps: dict[str, Batch], folder: Path) -> None:
    """One of two: its part of every step, and the sum with the other's."""
    for name, step in steps.items():
        for cut, first in CUTS.items():
            mine = step.groups[first:] if rank else step.groups[:first]
            summed = result_of(name, replace(step, groups=mine))
            for value in summed.values():
                dist.all_reduce(value)
            torch.save(summed, folder / f"{name} {cut} {rank}")


@pytest.fixture(scope="module")
def steps() -> dict[str, Batch]:
    return {name: step_of(name) for name in POLICIES}


@pytest.fixture(scope="module")
def folder(steps: dict[str, Batch], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes left behind, which are started once for all steps and cuts."""
    folder = tmp_path_factory.mktemp("processes")
    run_group(process, steps, folder)
    return folder


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", POLICIES)
def test_two_processes_have_the_loss_and_gradient_of_one(
    name: str, cut: str, steps: dict[str, Batch], folder: Path
) -> None:
    expected = result_of(name, steps[name])
    for rank in range(2):
        summed: Result = torch.load(folder / f"{name} {cut} {rank}")
        assert largest_relative_difference(expected, summed) < TOLERANCE
