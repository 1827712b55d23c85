"""Completions and their scores, group by group."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fovea.environments.base import Environment
from fovea.errors import DataError
from fovea.prompts import PromptedTask
from fovea.rollout.base import Engine
from fovea.types import Completion, Episode, Group, Sampling, Task, Turn


async def collect(
    engine: Engine,
    environment: Environment,
    prompted: Sequence[PromptedTask],
    *,
    sampling: Sampling,
    n: int,
    seed: tuple[int, ...],
    num_before: int = 0,
) -> list[Group]:
    """n scored completions of every prompt; each is scored as soon as its group is drawn.

    A group's random numbers depend on `seed` and its place in the step, after `num_before` others, so that a resumed
    run draws the same.
    """

    async def group(place: int, item: PromptedTask) -> Group:
        own = replace(sampling, seed=request_seed(*seed, place))
        completions = await engine.generate(item.prompt, own, n)
        episodes = tuple(_episode(environment, item.task, completion) for completion in completions)
        return Group(prompt=item.prompt, episodes=episodes)

    return await asyncio.gather(*(group(place, item) for place, item in enumerate(prompted, num_before)))


def request_seed(*parts: int) -> int:
    """64 well-mixed bits of these numbers."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])


def _episode(environment: Environment, task: Task, completion: Completion) -> Episode:
    turn = Turn(messages=tuple(environment.prompt(task)), text=completion.text, finish=completion.finish)
    score = environment.score(task, [turn])
    if not math.isfinite(score.reward):
        raise DataError(f"{task.id}: the reward of {completion.text[:80]!r} is {score.reward}; return a finite number")
    return Episode(task=task, completion=completion, score=score)
