"""Policies on one of several ranks, the batches that they train on, and a driver that sends each its pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fovea.advantages import with_advantages
from fovea.config.run import Config
from fovea.models.tiny import TinyParts
from fovea.processes.messages import Packing, Share, SharedArguments
from fovea.samples import replace_samples
from fovea.train.base import Needs, SftExample
from fovea.train.ranks import Ranks
from fovea.train.row_assignment import ImageKeys
from fovea.train.torch.policy import TorchPolicy, make_policy
from fovea.train.torch.sharding import full
from fovea.types import Batch, SampleGroup
from fovea.wiring.model import make_vlm
from tests.policies import make_batch, weights_of
from tests.tiny_models import tiny

STEPS = 3
MAX_TOKENS = 75
"""Of a micro-batch: some groups do not fit together."""
GRPO = {"entropy_coef": 0.01, "kl": {"coef": 0.05}, "ppo_epochs": 2}
PPO = {"name": "ppo", "ppo_epochs": 2, "minibatches": 2}
SEPARATE = {**PPO, "advantage": {"critic": {"trunk": "separate"}}}
UNFROZEN = {"freeze_vision_tower": False}
WARMUP = {"max_steps": 4, "learning_rate": 1e-3}
Found = dict[str, Any]
"""What a rank has seen, of what JSON can hold."""


def policy_of(
    ranks: Ranks,
    algorithm: dict[str, object],
    *,
    family: str = "qwen3_vl",
    parts: TinyParts | None = None,
    model: dict[str, object] = UNFROZEN,
    train: dict[str, object] = {},  # noqa: B006 (never written to)
    **settings: object,
) -> TorchPolicy:
    config = Config.model_validate(
        {
            "model": {"tiny": {"family": family}, "device": "cpu", **model},
            "algorithm": algorithm,
            "train": {"learning_rate": 1e-3, "lr_warmup_steps": 0, "max_tokens_per_microbatch": MAX_TOKENS, **train},
            "max_steps": 10,
            **settings,
        }
    )
    parts = parts or tiny(family)
    network = parts.network.to(getattr(torch, config.model.dtype))
    return make_policy(config, make_vlm(config, network, parts.processor.banned_ids), ranks=ranks)


@cache
def batch_of(seed: int, family: str = "qwen3_vl") -> Batch:
    """Five groups with images and without, of different lengths and rewards."""
    parts = _rendering_model(family)
    groups = (*make_batch(parts, seed).groups, *make_batch(parts, seed + 100).groups[1:])
    return rewarded(groups, seed, left_out=make_batch(parts, seed + 200).groups[:1])


def rewarded(groups: Sequence[SampleGroup], seed: int, **more: Any) -> Batch:
    """The groups with names and random rewards."""
    rng = np.random.default_rng(seed)
    batch = Batch(groups=tuple(replace(each, task_id=f"row {number}") for number, each in enumerate(groups)), **more)
    return replace_samples(batch, lambda sample: replace(sample, reward=float(rng.normal())))


@cache
def _rendering_model(family: str) -> TinyParts:
    return tiny(family)


def two_groups() -> Batch:
    """One with an image, one without: a rank has text only."""
    groups = batch_of(0).groups
    return Batch(groups=(groups[0], groups[2]))


class Driver:
    """A driver's end of the connection to a rank and the rank's own, with the calls that a step makes of its policy."""

    def __init__(self, policy: TorchPolicy) -> None:
        self.policy = policy
        self.here, self.there = Packing(), Packing()

    def compute_logprobs(self, batch: Batch) -> Batch:
        images_by_rank = self.policy.images_by_rank()
        needs = Needs.of(images_by_rank.schedule.algorithm)
        images = images_by_rank.for_logprobs(
            batch,
            policy_passes=needs.old_logprobs or needs.values,
            reference_passes=needs.reference_logprobs,
            masked_passes=needs.masked_logprobs,
            beside_engine=needs.beside_engine,
        )
        with_logprobs = self.policy.compute_logprobs(self._arrived(batch, images), needs)
        answer: Batch = self.here.unpack(self.there.pack(with_logprobs))
        return answer

    def update(self, batch: Batch) -> dict[str, float]:
        return self.policy.update(self._arrived(batch, self.policy.images_by_rank().to_update(batch)))

    def sft(self, pairs: Sequence[SftExample]) -> dict[str, float]:
        images = self.policy.images_by_rank().to_imitate([pair.prompt for pair in pairs])
        return self.policy.sft(self._arrived(pairs, images))

    def _arrived(self, argument: Any, images: Sequence[ImageKeys]) -> Any:
        """The argument as this rank receives it."""
        share = Share(SharedArguments([argument]), images[dist.get_rank() if len(images) > 1 else 0])
        return self.there.unpack(self.here.pack(share))[0]


def three_groups() -> Batch:
    """With an image, two images and none; no image is in two of them."""
    return Batch(groups=batch_of(0).groups[:3])


def step(policy: TorchPolicy, batch: Batch, kl_coef: float = 0.05) -> dict[str, float]:
    driver, algorithm = Driver(policy), policy.images_by_rank().schedule.algorithm
    batch, _ = with_advantages(driver.compute_logprobs(batch), algorithm, kl_coef)
    return driver.update(batch)


def checksum(policy: TorchPolicy) -> float:
    return float(sum(full(weight.detach()).double().abs().sum() for weight in weights_of(policy).values()))


LOCAL = {"memory/activations_gib", "expert_imbalance", "balance/ranks", "balance/microbatches"}
"""The largest of a rank's rows, and counts in which a prompt is as often as it is in rows; all else is of the batch."""


def assert_as_one_process(found: Sequence[Found], alone: Found) -> None:
    assert found[0]["metrics"] == found[1]["metrics"], "the ranks disagree"
    for ours, expected in zip(found[0]["metrics"], alone["metrics"], strict=True):
        assert ours.keys() == expected.keys()
        for name in ours.keys() - LOCAL:
            assert ours[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
        assert ours.get("grad_norm", 0.0) == pytest.approx(expected.get("grad_norm", 0.0), rel=1e-5)
    for of_rank in found:
        assert of_rank["weights"] == pytest.approx(alone["weights"], rel=1e-7)
        assert of_rank.get("losses", []) == pytest.approx(alone.get("losses", []), rel=1e-5)
