"""Collection of a rollout: scored episodes, group by group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fovea.environments.graders.grading import Grading
from fovea.environments.prompt_source import PromptedTask
from fovea.errors import FailedEpisodeError, UnscoredError
from fovea.rollout.base import Engine
from fovea.rollout.conversation import Conversations, SessionLog, scored
from fovea.rollout.engine_turns import EngineSpeaker, Interaction, first_turns, request_seed, session_seed
from fovea.rollout.schedule import Place
from fovea.types import Episode, Group, Request, Sampling, Turn
from fovea.utils.event_loop import gather_or_cancel


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
    sessions: SessionLog | None = None,
    for_update: bool = False,
) -> list[Group]:
    """Collect n scored episodes of every prompt, in order; each is scored as soon as it has ended.

    A group's random numbers depend on `seed` and its index in the step, which counts `num_before` earlier groups. A
    group with an UnscoredError is left out and the reason appended to `unscored`; None: the error is raised. An episode
    whose session fails is left out of its group and noted in `sessions`; None: its whole group is left out.
    """
    environment, indices = interaction.environment, range(num_before, num_before + len(prompted))
    places = [(index, number) for index in indices for number in range(n)]
    talks = Conversations.of(environment, places, engine=engine, log=sessions, seen_reply=interaction.seen_reply)

    async def episode(item: PromptedTask, request: Request, first: Turn, place: Place) -> Episode | FailedEpisodeError:
        speaker = EngineSpeaker(engine, interaction, item, request)
        conversation = await talks.go_on(item.task, session_seed(request, place[1]), first, speaker, place)
        try:
            return await scored(interaction.grading, item.task, conversation)
        except FailedEpisodeError as error:
            if sessions is None:
                raise
            return error

    async def group(index: int, item: PromptedTask) -> Group | None:
        # ids and seeds depend on no earlier call, so that a resumed run samples the same
        request = Request(
            id="/".join(map(str, (*seed, index))),
            prompt=item.prompt,
            sampling=replace(sampling, seed=request_seed(*seed, index)),
            n=n,
            for_update=for_update and not interaction.converses,
            keep=environment.max_turns > 1,
        )
        firsts = await first_turns(engine, environment, item, request)
        try:
            if not interaction.converses:
                return await _answered(interaction.grading, item, firsts)
            return _group_of(
                item,
                await gather_or_cancel(
                    episode(item, request, first, (index, number)) for number, first in enumerate(firsts)
                ),
            )
        except UnscoredError as error:
            if unscored is None:
                raise
            unscored.append(str(error))
            return None

    # all at once: graders that wait do so while the engine generates other groups
    groups = await gather_or_cancel(group(index, item) for index, item in zip(indices, prompted, strict=True))
    return [group for group in groups if group is not None]


async def _answered(grading: Grading, item: PromptedTask, firsts: Sequence[Turn]) -> Group:
    """The group of scored answers."""
    scores = await grading.scores(item.task, [(first,) for first in firsts])
    scored_turns = zip(firsts, scores, strict=True)
    episodes = (Episode(task=item.task, turns=(first,), score=score) for first, score in scored_turns)
    return Group(prompt=item.prompt, episodes=tuple(episodes))


def _group_of(item: PromptedTask, found: Sequence[Episode | FailedEpisodeError]) -> Group:
    """The group of the episodes that did not fail; UnscoredError where none is left."""
    episodes = tuple(each for each in found if isinstance(each, Episode))
    if not episodes:
        raise UnscoredError(f"all {len(found)} episodes failed; the last: {found[-1]}")
    return Group(prompt=item.prompt, episodes=episodes)
