"""An engine that records activations and a policy that takes them over, on one model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fovea.config.algorithm import Algorithm
from fovea.config.model import Lora, Model, TinyModel
from fovea.config.sections import Train
from fovea.models.activation_tape import Tape
from fovea.models.tiny import TinyParts
from fovea.models.trainable import choose_trainable
from fovea.models.vision.feature_cache import FeatureCache
from fovea.models.vlm import VLM
from fovea.rollout.embedded.engine import EmbeddedEngine
from fovea.types import Batch, Completion, Prompt, Sample, SampleGroup, Sampling
from fovea.weights.sync import SharedWeights
from fovea_gym.utils.event_loop import wait_for
from tests.policies import gradients_and_metrics, optimizer_steps, policy_on
from tests.records import sample_of
from tests.reference import largest_relative_difference
from tests.rollout.drawing import generate
from tests.tiny_models import mixed_prompts

GRADIENT_TOLERANCE = 1e-5
TEMPERATURE = 0.9
FROZEN = Model(tiny=TinyModel(), freeze_vision_tower=True)
LORA = Model(tiny=TinyModel(), lora=Lora(rank=4))
TRAINED = Model(tiny=TinyModel())


class Pair:
    """An engine that records and a policy, on one model; every other update is a plain one."""

    def __init__(
        self,
        parts: TinyParts,
        settings: Model = TRAINED,
        max_bytes: float = 2**26,
        linears: bool = True,
        algorithm: Algorithm | None = None,
        engine: Mapping[str, Any] | None = None,
        **train: object,
    ) -> None:
        choose_trainable(parts.network, settings, seed=0)
        cache = None if settings.trains_vision else FeatureCache(2**20)
        self.vlm = VLM(parts.network, parts.processor.banned_ids, feature_cache=cache)
        self.tape = Tape(self.vlm.linear_widths if linears else [], max_bytes, torch.float32)
        self.engine = EmbeddedEngine(
            self.vlm, parts.processor, tape=self.tape, **{"max_batch_tokens": 10_000, **(engine or {})}
        )
        values = {"learning_rate": 1e-3, "lr_warmup_steps": 0, "plain_update_every_steps": 1000} | train
        train_values = Train.model_validate(values)
        self.policy = policy_on(self.vlm, train_values, algorithm, temperature=TEMPERATURE, tape=self.tape)
        self.weight_sync = SharedWeights(self.engine)
        self.policy.update(Batch(groups=()))  # step 0 is a plain one
        wait_for(self.weight_sync.sync(0))
        self.prompts = mixed_prompts(parts)

    def rollout(self, max_new_tokens: int = 9, n: int = 3, **sampling: object) -> list[Sequence[Completion]]:
        """Completions of different lengths: 300 tokens of near-uniform sampling meet a stop."""
        settings = [
            Sampling(**{"max_new_tokens": max_new_tokens - 2 * index, "temperature": 0.9, "seed": index} | sampling)
            for index in range(len(self.prompts))
        ]
        return generate(self.engine, self.prompts, settings, n, for_update=True)

    def gradient(self, batch: Batch) -> dict[str, torch.Tensor]:
        """What the update stepped on."""
        self.batch = batch
        gradient, self.metrics = gradients_and_metrics(self.policy, batch)
        return gradient


def reusing_and_plain(
    make: Callable[[], Pair], draw: Callable[[Pair], Sequence[Sequence[Completion]]] = Pair.rollout
) -> list[Pair]:
    """A pair whose update takes over its rollout, and one whose update does not; both have the same gradient."""
    pairs, gradients = [make(), make()], []
    for pair, traces in zip(pairs, (True, False), strict=True):
        groups = draw(pair)
        gradients.append(pair.gradient(batch_of(pair.prompts, groups, traces=traces)))
    assert largest_relative_difference(gradients[1], gradients[0]) < GRADIENT_TOLERANCE
    return pairs


def batch_of(prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion]], *, traces: bool = True) -> Batch:
    rng = np.random.default_rng(0)
    num_tokens = sum(len(completion.token_ids_T) for group in groups for completion in group)

    def sample(completion: Completion) -> Sample:
        tokens = completion.token_ids_T
        return sample_of(
            tokens,
            rollout_logprobs_T=completion.logprobs_T,
            weight=1 / num_tokens,
            advantages_T=np.full(len(tokens), rng.normal(), dtype=np.float32),
            completion_ids=(completion.id,) if traces else (),
        )

    samples = [tuple(map(sample, group)) for group in groups]
    return Batch(groups=tuple(SampleGroup(prompt=p, samples=s) for p, s in zip(prompts, samples, strict=True)))


def gradients_of_steps(pair: Pair, batch: Batch) -> list[dict[str, torch.Tensor]]:
    """Those of every optimizer step, in proportion to which the weights move."""
    # with its usual epsilon Adam turns the rounding of a gradient near 0 into a step as long as any
    with optimizer_steps(eps=1.0) as steps:
        pair.metrics = pair.policy.update(batch)
    return steps
