"""Completions and their scores, group by group."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from fovea.environments.base import Environment, WaitsToScore
from fovea.environments.prompt_source import PromptedTask
from fovea.errors import DataError, ScoreError, UnscoredError
from fovea.rollout.base import Engine
from fovea.types import Completion, Episode, Group, Request, Sampling, Task, Turn


async def collect(  # noqa: PLR0913 (all of them are a rollout)
    engine: Engine,
    environment: Environment,
    prompted: Sequence[PromptedTask],
    *,
    sampling: Sampling,
    n: int,
    seed: tuple[int, ...],
    num_before: int = 0,
    unscored: list[str] | None = None,
    for_update: bool = False,
) -> list[Group]:
    """n scored completions of every prompt; each is scored as soon as its group is drawn.

    A group's random numbers depend on `seed` and its place in the step, after `num_before` others, so that a resumed
    run draws the same. An environment that waits to score does so in threads while others are drawn; the order of
    groups and episodes stays. A group that an environment leaves unscored is left out, and why is put into `unscored`
    (None: it raises).
    """
    threads = ThreadPoolExecutor(environment.scores_at_once) if isinstance(environment, WaitsToScore) else None

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
            episodes = await _episodes(environment, item.task, completions, threads)
        except ScoreError as error:
            reason = f"{item.task.id}: {error}"
            if unscored is None or not isinstance(error, UnscoredError):
                raise type(error)(reason) from error
            unscored.append(reason)
            return None
        return Group(prompt=item.prompt, episodes=episodes)

    try:
        groups = await asyncio.gather(*(group(place, item) for place, item in enumerate(prompted, num_before)))
    finally:
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)
    return [group for group in groups if group is not None]


async def _episodes(
    environment: Environment, task: Task, completions: Sequence[Completion], threads: ThreadPoolExecutor | None
) -> tuple[Episode, ...]:
    if threads is None:
        return tuple(_episode(environment, task, completion) for completion in completions)
    loop = asyncio.get_running_loop()
    calls = [loop.run_in_executor(threads, _episode, environment, task, completion) for completion in completions]
    return tuple(await asyncio.gather(*calls))


def request_seed(*parts: int) -> int:
    """64 well-mixed bits of these numbers."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])


def _episode(environment: Environment, task: Task, completion: Completion) -> Episode:
    turn = Turn(messages=tuple(environment.prompt(task)), text=completion.text, finish=completion.finish)
    score = environment.score(task, [turn])
    if not math.isfinite(score.reward):
        raise DataError(f"{task.id}: the reward of {completion.text[:80]!r} is {score.reward}; return a finite number")
    return Episode(task=task, completion=completion, score=score)
