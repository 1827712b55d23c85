"""Collection of a rollout: scored episodes, group by group."""

from __future__ import annotations

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
from fovea.utils.event_loop import gather_or_cancel


@dataclass(frozen=True, slots=True, kw_only=True)
class Interaction:
    """The model's counterpart in an episode: the environment, the graders, and the renderer of replies."""

    environment: Environment
    grading: Grading
    renderer: RendersPrompts


async def collect(  # noqa: PLR0913 (each says one thing about the rollout)
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
    """Collect n scored episodes of every prompt, in order; each group is scored as soon as it is generated.

    A group's random numbers depend on `seed` and its index in the step, which counts `num_before` earlier groups. A
    group with an UnscoredError is left out and the reason appended to `unscored`; None: the error is raised.
    """

    async def group(index: int, item: PromptedTask) -> Group | None:
        # ids and seeds depend on no earlier call, so that a resumed run samples the same
        several_turns = interaction.environment.max_turns > 1
        request = Request(
            id="/".join(map(str, (*seed, index))),
            prompt=item.prompt,
            sampling=replace(sampling, seed=request_seed(*seed, index)),
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

    # all at once: graders that wait do so while the engine generates other groups
    groups = await gather_or_cancel(group(index, item) for index, item in enumerate(prompted, num_before))
    return [group for group in groups if group is not None]


async def _episodes(
    engine: Engine, interaction: Interaction, item: PromptedTask, request: Request
) -> tuple[Episode, ...]:
    """Generate and score the n episodes of one task."""
    answers = await conversations(engine, interaction.environment, interaction.renderer, item, request)
    scores = await interaction.grading.scores(item.task, answers)
    return tuple(
        Episode(task=item.task, turns=turns, score=score) for turns, score in zip(answers, scores, strict=True)
    )


async def conversations(
    engine: Engine, environment: Environment, renderer: RendersPrompts, item: PromptedTask, request: Request
) -> Sequence[tuple[Turn, ...]]:
    """Generate the n episodes of one task, unscored; only their first turns unless the request is kept for others."""
    asked = tuple(environment.prompt(item.task))
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
    if not request.keep:
        return answers
    return await gather_or_cancel(
        later_turns(engine, environment, renderer, item.task, turns, request) for turns in answers
    )


def request_seed(*parts: int) -> int:
    """Hash these numbers into a 64-bit seed."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])
