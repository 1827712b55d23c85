"""Policies of a tiny model, and batches for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch

from fovea.advantages import with_advantages
from fovea.config.algorithm import Algorithm, Critic, Gae
from fovea.config.sections import Train
from fovea.models.heads import ValueHead
from fovea.models.modules import config_of
from fovea.models.policy_network import PolicyNetwork
from fovea.models.tiny import TinyParts
from fovea.models.trainable import trainable_parameters, value_parameters
from fovea.models.vlm import VLM
from fovea.samples import replace_samples, with_old_logprobs, with_values
from fovea.train.adamw import AdamWSettings
from fovea.train.microbatches import MicroBatcher, MicrobatchLimit
from fovea.train.packing import MicroBatch
from fovea.train.ranks import ALONE
from fovea.train.torch.optimizer import Optimizer
from fovea.train.torch.passes import ValueFunction, ValueModel
from fovea.train.torch.policy import TorchPolicy
from fovea.train.update import TrainedPolicy
from fovea.types import Batch, Metrics, Prompt, Sample, SampleGroup
from tests.records import sample_of
from tests.reference import gradients, reference_logprobs
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
    vlm = VLM(parts.network, parts.processor.banned_ids)
    return policy_on(vlm, train_settings(**train), algorithm, temperature=temperature)


def policy_on(
    vlm: PolicyNetwork, train: Train, algorithm: Algorithm | None = None, *, temperature: float = 0.9, **models: Any
) -> TorchPolicy:
    """A policy of a run of ten steps; `models` are the other arguments of `TorchPolicy`."""
    settings = algorithm or Algorithm()
    return TorchPolicy(vlm, train=train, algorithm=settings, temperature=temperature, max_steps=10, **models)


def weights_of(policy: TrainedPolicy) -> dict[str, torch.Tensor]:
    """The weights of a policy by name, adapters beside them; shards where they are sharded."""
    return {weight.name: weight.parameter for weight in policy.weights_to_sync()}


def micro_batcher(parts: TinyParts, **train: object) -> MicroBatcher:
    """Packs the samples of a policy of this model in one process."""
    settings = train_settings(**train)
    vlm = VLM(parts.network, parts.processor.banned_ids)
    return MicroBatcher(vlm, settings, ALONE, MicrobatchLimit(settings, ALONE), shards_tower=False)


@contextmanager
def packed_rows() -> Iterator[list[list[MicroBatch]]]:
    """The micro-batches of each pass of this process in the block."""
    packed: list[list[MicroBatch]] = []
    pack = MicroBatcher.micro_batches

    def noted(batcher: MicroBatcher, *groups: Any) -> list[MicroBatch]:
        packed.append(pack(batcher, *groups))
        return packed[-1]

    with mock.patch.object(MicroBatcher, "micro_batches", noted):
        yield packed


@contextmanager
def optimizer_steps(eps: float | None = None) -> Iterator[list[dict[str, torch.Tensor]]]:
    """The float32 gradients by name that AdamW is given in each optimizer step of the block: an update frees them.

    `eps` replaces AdamW's.
    """
    steps: list[dict[str, torch.Tensor]] = []
    step = Optimizer.step

    def noted(optimizer: Optimizer) -> None:
        masters = optimizer.masters.by_name.items()
        for group in optimizer.adamw.param_groups if eps is not None else ():
            group["eps"] = eps
        handle = optimizer.adamw.register_step_pre_hook(
            lambda *_: steps.append({name: x.grad.clone() for name, x in masters if x.grad is not None})
        )
        step(optimizer)
        handle.remove()

    with mock.patch.object(Optimizer, "step", noted):
        yield steps


def gradients_and_metrics(policy: TorchPolicy, batch: Batch) -> tuple[dict[str, torch.Tensor], Metrics]:
    """The gradient by name of each parameter in its latest step of an update, a critic's too, and the metrics."""
    with optimizer_steps() as steps:
        metrics = policy.update(batch)
    return {name: gradient for step in steps for name, gradient in step.items()}, metrics


def update_gradients(policy: TorchPolicy, batch: Batch) -> dict[str, torch.Tensor]:
    return gradients_and_metrics(policy, batch)[0]


def count_passes(policy: TorchPolicy) -> list[int]:
    """Grows by one with every forward pass of the model from now on."""
    passes: list[int] = []
    policy.vlm.register_forward_pre_hook(lambda *_: passes.append(1))
    return passes


def flat_weights(policy: TorchPolicy) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy.vlm.parameters()])


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
    for prompt, sample in pairs_of(batch):
        logprobs = reference_logprobs(parts, prompt, sample.token_ids_T, temperature=0.9)
        ratio = (logprobs - logprobs.detach()).exp()
        loss = loss - (ratio * torch.from_numpy(sample.advantages_T)).sum()
    (loss / NUM_TOKENS).backward()
    return policy_gradients(parts.network)


def policy_gradients(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients of a network by the names that its policy has for them; they are cleared."""
    return {f"network.{name}": gradient for name, gradient in gradients(network).items()}


def pairs_of(batch: Batch) -> list[tuple[Prompt, Sample]]:
    """Each sample with its prompt."""
    return [(group.prompt, sample) for group in batch.groups for sample in group.samples]


def many_groups(number: int) -> Batch:
    """So many groups, three of every seed; the first outweighs the others, which a sum in 16 bits then drops."""
    parts = tiny("qwen3_vl")
    groups = [group for seed in range(-(-number // 3)) for group in make_batch(parts, seed).groups][:number]
    samples = tuple(replace(sample, weight=sample.weight * 20) for sample in groups[0].samples)
    return Batch(groups=(replace(groups[0], samples=samples), *groups[1:]))


def _sample(ids: np.ndarray, rng: np.random.Generator) -> Sample:
    return sample_of(
        ids,
        rollout_logprobs_T=np.full(len(ids), -5.0, dtype=np.float32),
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
    """The batch with this advantage for every token of one group."""
    return with_group(batch, group, lambda s: replace(s, advantages_T=np.full(len(s.token_ids_T), value, np.float32)))


def with_group(batch: Batch, index: int, change: Callable[[Sample], Sample]) -> Batch:
    """The batch with the samples of one group changed."""
    of_group = set(map(id, batch.groups[index].samples))
    return replace_samples(batch, lambda sample: change(sample) if id(sample) in of_group else sample)


def batch_of(*, on_policy: bool) -> Batch:
    """A batch with equal completions and reference log-probs; on-policy without old log-probs."""
    rng = np.random.default_rng(2)
    batch = replace_samples(
        repeated(make_batch(tiny("qwen3_vl"))),
        lambda sample: replace(sample, reference_logprobs_T=sample.rollout_logprobs_T + np.float32(rng.normal())),
    )
    return replace_samples(batch, lambda sample: replace(sample, old_logprobs_T=None)) if on_policy else batch


GAE = Gae(gamma=0.99, gae_lambda=0.95, critic=Critic(value_clip=None))
PPO = Algorithm(name="ppo", ppo_epochs=1, entropy_coef=0.0, advantage=GAE)


def ppo_policy(
    parts: TinyParts, *, separate: bool = False, detach_trunk: bool = False, algorithm: Algorithm = PPO, **train: object
) -> TorchPolicy:
    """With a value head that is not 0, so that values differ."""
    torch.manual_seed(7)
    settings = train_settings(**{"lr_warmup_steps": 0, **train})
    width = config_of(parts.network).text_config.hidden_size
    head = None if separate else ValueHead(width, detach_trunk=detach_trunk)
    vlm = VLM(parts.network, parts.processor.banned_ids, value_head=head)
    model = ValueModel(copy.deepcopy(vlm)) if separate else None
    linear = (model.head if model is not None else vlm.value_head).linear  # type: ignore[union-attr]
    torch.nn.init.normal_(linear.weight, std=0.1)
    values = value_parameters(vlm) if model is None else trainable_parameters(model)
    critic = AdamWSettings.of_run(settings, peak_rate=1e-2, max_steps=10)
    return policy_on(
        vlm, settings, algorithm, value_function=ValueFunction(optimizer=Optimizer(values, critic), model=model)
    )


def with_rewards(batch: Batch) -> Batch:
    rewards = iter([1.0, 0.0, 0.5, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    return replace_samples(batch, lambda sample: replace(sample, reward=next(rewards)))


def logprobs_and_values(policy: TorchPolicy, batch: Batch) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Whichever trunk the value function has."""
    if policy.value_function is not None and policy.value_function.model is not None:
        return policy.logprobs(batch), policy.values(batch)
    return policy.logprobs_and_values(batch)


def scored(policy: TorchPolicy, batch: Batch, algorithm: Algorithm = PPO) -> Batch:
    logprobs, values = logprobs_and_values(policy, batch)
    batch = with_values(with_old_logprobs(with_rewards(batch), logprobs), values)
    return with_advantages(batch, algorithm, 0.0)[0]
