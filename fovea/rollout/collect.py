"""Collection of a rollout: scored episodes, group by group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fovea.environments.base import Environment
from fovea.environments.graders.grading import Grading
from fovea.environments.prompt_source import PromptedTask, RendersPrompts
from fovea.errors import UnscoredError
from fovea.rollout.base import Engine
from fovea.types import Episode, Group, Prompt, Request, Sampling, Task, Turn, TurnTokens
from fovea.utils.event_loop import gather_or_cancel


async def later_turns(
    engine: Engine,
    environment: Environment,
    renderer: RendersPrompts,
    task: Task,
    turns: Sequence[Turn],
    request: Request,
) -> tuple[Turn, ...]:
    """Continue an episode to its end and return all turns; the last of `turns` was generated for `request`."""
    if len(turns) >= environment.max_turns:
        return tuple(turns)
    messages = environment.reply(task, turns)
    if messages is None:
        return tuple(turns)
    last = turns[-1].tokens
    assert last is not None, "an episode continues from tokens that an engine generated"
    # ids are only appended: re-tokenising the text of a conversation may give other ids than those that were sampled,
    # and their log-probs would then belong to other tokens
    observation = renderer.observation(
        messages, after=int(last.completion.token_ids_T[-1]), where=f"turn {len(turns) + 1} of {task.id}"
    )
    more = Request(
        id=f"{last.completion.id}/turn{len(turns) + 1}",
        prompt=extended(request.prompt, last.completion.token_ids_T, observation),
        sampling=replace(request.sampling, seed=_next_seed(request.sampling.seed, last.completion.id)),
        keep=len(turns) + 1 < environment.max_turns,
        continues=last.completion.id,
    )
    (completion,) = await engine.generate(more)
    turn = Turn(
        messages=tuple(messages),
        text=completion.text,
        finish=completion.finish,
        tokens=TurnTokens(observation=observation, completion=completion),
    )
    return await later_turns(engine, environment, renderer, task, (*turns, turn), more)


def extended(prompt: Prompt, answer_ids_T: NDArray[np.int64], observation: Prompt) -> Prompt:
    """Prompt of the next turn: the conversation so far, its token ids appended to each other."""
    return Prompt(
        token_ids_L=np.concatenate([prompt.token_ids_L, answer_ids_T, observation.token_ids_L]),
        unexpanded_ids_U=np.concatenate([prompt.unexpanded_ids_U, answer_ids_T, observation.unexpanded_ids_U]),
        images=prompt.images + observation.images,
    )


def _next_seed(seed: int, completion_id: str) -> int:
    """Seed of the next turn, different for each completion of a group."""
    # the last part of a completion's id is its number in the group
    number = int(completion_id.rpartition("/")[2])
    return int(np.random.SeedSequence((seed, number, 1)).generate_state(1, np.uint64)[0])


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
