"""Policies of a tiny model, and batches for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from fovea.config.algorithm import Algorithm
from fovea.config.sections import Train
from fovea.models.tiny import TinyParts
from fovea.models.trainable import trainable_parameters
from fovea.models.vlm import VLM
from fovea.samples import replace_samples
from fovea.train.torch.policy import TorchPolicy
from fovea.train.update import TrainedPolicy
from fovea.types import Batch, Sample, SampleGroup
from tests.reference import reference_logprobs
from tests.tiny_models import mixed_prompts, random_completions, tiny

LENGTHS = ((5, 1, 7), (3, 9, 2), (4, 4, 6))
NO_CLIPPING = 1e9
GRADIENT_TOLERANCE = 1e-5
RATES = {"language model": 2.0**-10, "vision tower": 2.0**-8, "projector": 2.0**-9}
"""Learning rates by part of the model; their ratios are exact."""
APART: dict[str, object] = {
    "learning_rate": RATES["language model"],
    "vision_tower_learning_rate": RATES["vision tower"],
    "projector_learning_rate": RATES["projector"],
}
"""Settings of `train` with these rates."""


NUM_TOKENS = 60
"""Token count by which losses are divided; more than the 41 of LENGTHS, since groups that are left out count too."""


def train_settings(**settings: object) -> Train:
    return Train.model_validate({"learning_rate": 1e-3, "max_grad_norm": NO_CLIPPING, **settings})


def make_policy(
    parts: TinyParts, *, algorithm: Algorithm | None = None, temperature: float = 0.9, **train: object
) -> TorchPolicy:
    settings = train_settings(**train)
    return TorchPolicy(
        VLM(parts.network, parts.processor.banned_ids),
        train=settings,
        algorithm=algorithm or Algorithm(),
        temperature=temperature,
        max_steps=10,
    )


def weights_of(policy: TrainedPolicy) -> dict[str, torch.Tensor]:
    """The weights of a policy by name, adapters beside them; shards where they are sharded."""
    return {weight.name: weight.parameter for weight in policy.outgoing()}


def stepped_gradients(policy: TorchPolicy) -> dict[torch.Tensor, torch.Tensor]:
    """What the latest optimizer step of each float32 weight was taken on, from now on: an update frees gradients."""
    found: dict[torch.Tensor, torch.Tensor] = {}

    def keep(adamw: torch.optim.Optimizer, *_: object) -> None:
        weights = [weight for group in adamw.param_groups for weight in group["params"]]
        found.update({weight: weight.grad.clone() for weight in weights if weight.grad is not None})

    for optimizer in policy._optimizers:
        optimizer.adamw.register_step_pre_hook(keep)
    return found


def accumulate(policy: TorchPolicy, groups: Sequence[SampleGroup]) -> None:
    """Add the gradients of these groups to those that are there."""
    policy._backward(groups, 1.0)


def update_gradients(policy: TorchPolicy, batch: Batch) -> dict[str, torch.Tensor]:
    """The gradients of the policy's float32 parameters in an update of one optimizer step."""
    found = stepped_gradients(policy)
    policy.update(batch)
    return {name: found[weight] for name, weight in trainable_parameters(policy.vlm).items() if weight in found}


def make_batch(parts: TinyParts, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    groups = [
        SampleGroup(prompt=prompt, samples=tuple(_sample(ids, rng) for ids in completions))
        for prompt, completions in zip(mixed_prompts(parts), random_completions(LENGTHS, seed), strict=True)
    ]
    return Batch(groups=tuple(groups))


def written_out_gradients(parts: TinyParts, batch: Batch) -> dict[str, torch.Tensor]:
    """Those of the token mean over the batch of -A exp(lp - sg(lp)), one row at a time through transformers."""
    loss = torch.zeros(())
    for group in batch.groups:
        for sample in group.samples:
            logprobs = reference_logprobs(parts, group.prompt, sample.token_ids_T, temperature=0.9)
            ratio = (logprobs - logprobs.detach()).exp()
            assert sample.advantages_T is not None
            loss = loss - (ratio * torch.from_numpy(sample.advantages_T)).sum()
    (loss / NUM_TOKENS).backward()
    found = {f"network.{name}": p.grad.clone() for name, p in parts.network.named_parameters() if p.grad is not None}
    parts.network.zero_grad()
    return found


def many_groups(number: int) -> Batch:
    """So many groups, three of every seed; the first outweighs the others, which a sum in 16 bits then drops."""
    parts = tiny("qwen3_vl")
    groups = [group for seed in range(-(-number // 3)) for group in make_batch(parts, seed).groups][:number]
    samples = tuple(replace(sample, weight=sample.weight * 20) for sample in groups[0].samples)
    return Batch(groups=(replace(groups[0], samples=samples), *groups[1:]))


def _sample(ids: np.ndarray, rng: np.random.Generator) -> Sample:
    return Sample(
        token_ids_T=ids,
        mask_T=np.ones(len(ids), dtype=np.bool_),
        rollout_logprobs_T=np.full(len(ids), -5.0, dtype=np.float32),
        reward=0.0,
        weight=1 / NUM_TOKENS,
        advantages_T=np.full(len(ids), rng.normal(), dtype=np.float32),
    )


REPEATED = (0, 1, 0, 2, 1, 0)
"""Which of the three completions of a group each sample has."""


def repeated(batch: Batch) -> Batch:
    """Six samples of three unequal completions in each group; no two have the same advantage or old log-probs."""
    rng = np.random.default_rng(1)

    def copy(sample: Sample) -> Sample:
        advantages_T = np.full_like(sample.advantages_T, rng.normal())
        old_T = sample.rollout_logprobs_T + rng.normal(size=len(advantages_T)).astype(np.float32)
        weight = sample.weight * rng.uniform(0.5, 2)
        return replace(sample, advantages_T=advantages_T, rollout_logprobs_T=old_T, old_logprobs_T=old_T, weight=weight)

    groups = [replace(g, samples=tuple(copy(g.samples[place]) for place in REPEATED)) for g in batch.groups]
    return Batch(groups=tuple(groups))


def named(batch: Batch) -> Batch:
    return replace(batch, groups=tuple(replace(g, task_id=f"row {i}") for i, g in enumerate(batch.groups)))


def with_advantage(batch: Batch, group: int, value: float) -> Batch:
    groups = list(batch.groups)
    samples = [replace(s, advantages_T=np.full_like(s.advantages_T, value)) for s in groups[group].samples]
    groups[group] = replace(groups[group], samples=tuple(samples))
    return replace(batch, groups=tuple(groups))


def batch_of(*, on_policy: bool) -> Batch:
    """A batch with equal completions and reference log-probs; on-policy without old log-probs."""
    rng = np.random.default_rng(2)
    batch = replace_samples(
        repeated(make_batch(tiny("qwen3_vl"))),
        lambda sample: replace(sample, reference_logprobs_T=sample.rollout_logprobs_T + np.float32(rng.normal())),
    )
    return replace_samples(batch, lambda sample: replace(sample, old_logprobs_T=None)) if on_policy else batch
