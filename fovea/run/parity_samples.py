"""The samples of the parity gate: completions that the engine draws, and the policy's log-probs of their tokens.

Axes: `A` action tokens of a group, `T` tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fovea.environments.prompt_source import PromptedTask
from fovea.rollout.collect import conversations, request_seed
from fovea.run.context import Run
from fovea.run.parity_push import Array
from fovea.run.parity_rows import PromptKind
from fovea.run.rollout_step import training_sampling
from fovea.samples import sample_group
from fovea.train.base import Needs
from fovea.types import Batch, Episode, Group, Request, SampleGroup, Sampling, Score
from fovea.utils.event_loop import gather_or_cancel

SAMPLES_PER_PROMPT = 2
"""Completions per prompt: the smallest group, so that completions share a prompt as in a rollout."""


async def draw(
    run: Run, prompts: Sequence[tuple[PromptKind, PromptedTask]], version: int, *, as_for_update: bool
) -> list[SampleGroup]:
    """Sample completions of all prompts concurrently, as in a rollout; those with images to the end of their episodes.

    `as_for_update`: on the engine's path for completions to train on, whose recorded activations a push frees.
    """
    several_turns = run.environment.max_turns > 1

    async def one(index: int, kind: PromptKind, prompted: PromptedTask) -> SampleGroup:
        request = Request(
            id=f"parity/{version}/{index}",
            prompt=prompted.prompt,
            sampling=replace(_sampling(run), seed=request_seed(run.config.seed, index)),
            n=SAMPLES_PER_PROMPT,
            for_update=as_for_update and not several_turns,
            keep=several_turns and kind == "with images",
        )
        turns = await conversations(run.engine, run.environment, run.sources.train.renderer, prompted, request)
        episodes = tuple(Episode(task=prompted.task, turns=each, score=_UNSCORED) for each in turns)
        group = sample_group(Group(prompt=prompted.prompt, episodes=episodes), _ZEROS, _ZEROS)
        # without completion ids, so that the trainer recomputes everything instead of reusing recorded activations
        return replace(group, samples=tuple(replace(sample, completion_ids=()) for sample in group.samples))

    return await gather_or_cancel(one(index, *each) for index, each in enumerate(prompts))


_UNSCORED, _ZEROS = Score(reward=0.0, accuracy=0.0), (0.0,) * SAMPLES_PER_PROMPT


def _sampling(run: Run) -> Sampling:
    """Sampling parameters of the rollout, approximate weights included, with a lower token limit."""
    sampling = training_sampling(run.config)
    return replace(sampling, max_new_tokens=min(run.config.parity.max_new_tokens, sampling.max_new_tokens))


async def score(run: Run, groups: Sequence[SampleGroup]) -> list[Array]:
    """The policy's log-probs [A] of each group."""
    annotated = await run.policy.annotate(Batch(groups=tuple(groups)), Needs(old_logprobs=True, beside_engine=True))
    found = []
    for group in annotated.groups:
        scored = [(sample.old_logprobs_T, sample.mask_T) for sample in group.samples]
        found.append(np.concatenate([values_T[mask_T] for values_T, mask_T in scored if values_T is not None]))
    return found


def kind_of(group: SampleGroup) -> PromptKind:
    return "with images" if group.images else "without images"
