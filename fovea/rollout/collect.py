"""Episodes and their scores, group by group."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fovea.environments.base import Environment
from fovea.environments.graders.grading import Grading
from fovea.environments.prompt_source import PromptedTask, RendersPrompts
from fovea.errors import UnscoredError
from fovea.rollout.base import Engine
from fovea.rollout.multi_turn import later_turns
from fovea.types import Episode, Group, Request, Sampling, Turn, TurnTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Interaction:
    """The counterpart of the model in an episode: who replies to it, how replies become tokens, who scores it."""

    environment: Environment
    grading: Grading
    renderer: RendersPrompts


async def collect(  # noqa: PLR0913 (all of them are a rollout)
    engine: Engine,
    interaction: Interaction,
    prompted: Sequence[PromptedTask],
    *,
    sampling: Sampling,
    n: int,
    seed: tuple[int, ...],
    num_before: int = 0,
    unscored: list[str] | None = None,
    for_update: bool = False,
) -> list[Group]:
    """n scored episodes of every prompt; each group is scored as soon as it is drawn.

    A group's random numbers depend on `seed` and its place in the step, after `num_before` others, so that a resumed
    run draws the same. Graders that wait do so while other groups are drawn; the order of groups and episodes stays. A
    group with an UnscoredError is left out, and the reason is appended to `unscored` (None: the error is raised).
    """

    async def group(place: int, item: PromptedTask) -> Group | None:
        several_turns = interaction.environment.max_turns > 1
        request = Request(
            id="/".join(map(str, (*seed, place))),
            prompt=item.prompt,
            sampling=replace(sampling, seed=request_seed(*seed, place)),
            n=n,
            for_update=for_update and not several_turns,
            keep=several_turns,
        )
        try:
            episodes = await _episodes(engine, interaction, item, request)
        except UnscoredError as error:
            if unscored is None:
                raise
            unscored.append(str(error))
            return None
        return Group(prompt=item.prompt, episodes=episodes)

    groups = await asyncio.gather(*(group(place, item) for place, item in enumerate(prompted, num_before)))
    return [group for group in groups if group is not None]


async def _episodes(
    engine: Engine, interaction: Interaction, item: PromptedTask, request: Request
) -> tuple[Episode, ...]:
    """The n episodes of one task, scored."""
    asked = tuple(interaction.environment.prompt(item.task))
    answers: Sequence[tuple[Turn, ...]] = [
        (
            Turn(
                messages=asked,
                text=completion.text,
                finish=completion.finish,
                tokens=TurnTokens(observation=item.prompt, completion=completion),
            ),
        )
        for completion in await engine.generate(request)
    ]
    if interaction.environment.max_turns > 1:
        calls = (
            later_turns(engine, interaction.environment, interaction.renderer, item.task, turns, request)
            for turns in answers
        )
        answers = await asyncio.gather(*calls)
    scores = await interaction.grading.scores(item.task, answers)
    return tuple(
        Episode(task=item.task, turns=turns, score=score) for turns, score in zip(answers, scores, strict=True)
    )


def request_seed(*parts: int) -> int:
    """A 64-bit seed, hashed from these numbers."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])
