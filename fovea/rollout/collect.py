"""Completions and their scores, group by group."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fovea.environments.base import Environment
from fovea.environments.graders.grading import Grading
from fovea.environments.prompt_source import PromptedTask
from fovea.errors import UnscoredError
from fovea.rollout.base import Engine
from fovea.types import Completion, Episode, Group, Request, Sampling, Task, Turn


async def collect(  # noqa: PLR0913 (all of them are a rollout)
    engine: Engine,
    environment: Environment,
    grading: Grading,
    prompted: Sequence[PromptedTask],
    *,
    sampling: Sampling,
    n: int,
    seed: tuple[int, ...],
    num_before: int = 0,
    unscored: list[str] | None = None,
    for_update: bool = False,
) -> list[Group]:
    """n scored completions of every prompt; each group is scored as soon as it is drawn.

    A group's random numbers depend on `seed` and its place in the step, after `num_before` others, so that a resumed
    run draws the same. Graders that wait do so while other groups are drawn; the order of groups and episodes stays. A
    group with an UnscoredError is left out, and the reason is appended to `unscored` (None: the error is raised).
    """

    async def group(place: int, item: PromptedTask) -> Group | None:
        request = Request(
            id="/".join(map(str, (*seed, place))),
            prompt=item.prompt,
            sampling=replace(sampling, seed=request_seed(*seed, place)),
            n=n,
            for_update=for_update,
        )
        completions = await engine.generate(request)
        try:
            episodes = await _episodes(environment, grading, item.task, completions)
        except UnscoredError as error:
            if unscored is None:
                raise
            unscored.append(str(error))
            return None
        return Group(prompt=item.prompt, episodes=episodes)

    groups = await asyncio.gather(*(group(place, item) for place, item in enumerate(prompted, num_before)))
    return [group for group in groups if group is not None]


async def _episodes(
    environment: Environment, grading: Grading, task: Task, completions: Sequence[Completion]
) -> tuple[Episode, ...]:
    asked = tuple(environment.prompt(task))
    answers = [[Turn(messages=asked, text=each.text, finish=each.finish)] for each in completions]
    scores = await grading.scores(task, answers)
    return tuple(
        Episode(task=task, completion=completion, score=score)
        for completion, score in zip(completions, scores, strict=True)
    )


def request_seed(*parts: int) -> int:
    """A 64-bit seed, hashed from these numbers."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])
