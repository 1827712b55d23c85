"""Episodes of three turns and of ten, sampled by an engine, and a batch of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import SuppressTokensLogitsProcessor

from fovea.config.algorithm import Algorithm
from fovea.data.prompt_source import PromptedTask
from fovea.models.plain import PlainVLM
from fovea.models.tiny import TinyParts
from fovea.models.vlm import VLM
from fovea.rollout.base import Engine
from fovea.rollout.collect import Interaction, collect
from fovea.samples import make_batch, replace_samples
from fovea.train.base import Needs
from fovea.types import Batch, Group, Prompt, Sample, Sampling
from fovea_gym.environments.base import Environment
from fovea_gym.environments.shapes.environment import ShapesGrader
from fovea_gym.examples.shapes_zoom import ShapesZoom, ShapesZoomEnvironment
from fovea_gym.graders.grading import Grading
from fovea_gym.types import Message, Task, Turn
from fovea_gym.utils.event_loop import wait_for
from tests.hub_models import Loaded
from tests.policies import policy_on, train_settings
from tests.reference import reference_logprobs
from tests.rollout.drawing import make_engine, noted, plain_engine
from tests.tiny_models import image, renderer

TEMPERATURE = 0.9
TOLERANCE = 1e-5
"""Of log-probs by two paths, in float32."""
SAMPLING = Sampling(max_new_tokens=7, temperature=TEMPERATURE, seed=3)


class LooksTwice(ShapesZoom):
    """Every first answer is taken for a request of the first quarter, of the second picture for another."""

    max_turns = 3

    def reply(self, task: Task, turns: Sequence[Turn]) -> Sequence[Message] | None:
        asked = Turn(messages=(), text=rf"\crop{{{len(turns)}}}")
        return super().reply(task, [asked])


def environment(kind: type[LooksTwice] = LooksTwice) -> LooksTwice:
    return kind(ShapesZoomEnvironment(train_size=8), seed=0)


def sampled(
    parts: TinyParts,
    engine: Engine,
    *,
    rows: int = 2,
    n: int = 3,
    asked: Environment | None = None,
) -> list[Group]:
    asked, render = asked or environment(), renderer(parts)
    tasks = asked.tasks("train")[:rows]
    prompted = [PromptedTask(task=task, prompt=render.prompt(asked.prompt(task))) for task in tasks]
    interaction = Interaction(environment=asked, grading=Grading(graders=(ShapesGrader(),)), renderer=render)
    return wait_for(collect(engine, interaction, prompted, sampling=SAMPLING, n=n, seed=(1,)))


def assert_same_turns(groups: Sequence[Group], others: Sequence[Group], atol: float = TOLERANCE) -> None:
    """The completions of all turns are the same, their log-probs within `atol`."""
    first, second = ([x for group in each for y in group.episodes for x in y.tokens] for each in (groups, others))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a.completion.token_ids_T, b.completion.token_ids_T)
        np.testing.assert_allclose(a.completion.logprobs_T, b.completion.logprobs_T, rtol=0, atol=atol)
        assert a.completion.text == b.completion.text


def assert_drawn_and_scored_alike(fast: TinyParts, plain: TinyParts) -> None:
    """Turns with images, on the fast path and on the plain one, which computes each from the whole conversation."""
    groups, twins = sampled(fast, make_engine(fast)), sampled(plain, plain_engine(plain))  # type: ignore[arg-type]
    assert_same_turns(groups, twins)
    batch, scored = batch_of(groups), []
    for model in (VLM(fast.network, fast.processor.banned_ids), PlainVLM(plain.network, plain.processor.banned_ids)):
        policy = policy_on(model, train_settings(), temperature=TEMPERATURE)
        scored.append(policy.compute_logprobs(batch, Needs(old_logprobs=True)))
    for one, other in zip(scored[0].samples, scored[1].samples, strict=True):
        assert one.old_logprobs_T is not None
        assert len(one.images) == 2
        np.testing.assert_allclose(one.old_logprobs_T, other.old_logprobs_T, atol=TOLERANCE)


def batch_of(groups: Sequence[Group]) -> Batch:
    batch, _ = make_batch(list(groups), Algorithm(kl="loss"), max_new_tokens=7)
    rng = np.random.default_rng(0)

    def advantaged(sample: Sample) -> Sample:
        return replace(sample, advantages_T=np.where(sample.mask_T, np.float32(rng.normal()), np.float32(0)))

    return replace_samples(batch, advantaged)


def whole_logprobs(parts: TinyParts, batch: Batch) -> list[Tensor]:
    """By transformers on each whole conversation, of the policy's own tokens."""
    reference, found = processor_logprobs if isinstance(parts, Loaded) else reference_logprobs, list[Tensor]()
    for group in batch.groups:
        for sample in group.samples:
            prompt = replace(group.prompt, images=group.prompt.images + sample.images)
            logprobs_T = reference(parts, prompt, sample.token_ids_T, TEMPERATURE)
            found.append(logprobs_T[torch.from_numpy(sample.mask_T)])
    return found


def processor_logprobs(parts: TinyParts, prompt: Prompt, completion_T: np.ndarray, temperature: float) -> Tensor:
    """As `reference_logprobs`, for a family whose inputs transformers' processor makes."""
    ids = torch.from_numpy(np.concatenate([prompt.token_ids_L, completion_T]))[None]
    inputs = parts.processor.family.forward_inputs(ids, prompt.images)
    logits = parts.network(**inputs | {"input_ids": ids}, use_cache=False).logits[0, prompt.num_tokens - 1 : -1]
    suppress = SuppressTokensLogitsProcessor(parts.processor.banned_ids)
    logprobs = suppress(ids, logits / temperature).log_softmax(-1)  # type: ignore[arg-type]
    return logprobs.gather(1, torch.from_numpy(completion_T)[:, None])[:, 0]


def longest_tokens(groups: Sequence[Group]) -> int:
    """Tokens of the longest conversation with its prompt."""
    return max(
        group.prompt.num_tokens + sum(t.observation.num_tokens + len(t.completion.token_ids_T) for t in episode.tokens)
        for group in groups
        for episode in group.episodes
    )


TURNS = 10


class Gallery(LooksTwice):
    """Every answer gets another picture; a subclass has a different one after the turn `exchanged`."""

    max_turns = TURNS
    exchanged = 0

    def reply(self, task: Task, turns: Sequence[Turn]) -> Sequence[Message]:
        number = len(turns)
        picture = image(100 + number + 50 * (number == self.exchanged))
        return (Message(role="user", parts=(picture, f"What is {number}?")),)


def ten_turns(parts: TinyParts, engine: Engine, kind: type[Gallery] = Gallery) -> list[Group]:
    return sampled(parts, engine, rows=1, n=2, asked=environment(kind))


def drawn_and_checked(parts: TinyParts, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """A group of two episodes of ten turns, the prompts of whose turns extended each other."""
    asked: dict[str, Prompt] = {}
    noted(monkeypatch, engine, "generate", lambda request: asked.update({request.id: request.prompt}))
    groups = ten_turns(parts, engine)
    samples = batch_of(groups).samples
    assert [len(sample.images) for sample in samples] == [TURNS - 1] * 2
    assert len(asked) == 1 + 2 * (TURNS - 1)
    for episode, sample in zip(groups[0].episodes, samples, strict=True):
        whole = np.concatenate([groups[0].prompt.token_ids_L, sample.token_ids_T])
        for before, turn in pairwise(episode.tokens):
            prompt_L = asked[turn.completion.id.rpartition("/")[0]].token_ids_L
            np.testing.assert_array_equal(prompt_L, whole[: len(prompt_L)])
            added = np.concatenate([before.completion.token_ids_T, turn.observation.token_ids_L])
            np.testing.assert_array_equal(prompt_L[-len(added) :], added)
    return groups
