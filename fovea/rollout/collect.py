"""Collection of a rollout: scored episodes in groups; later turns only append token ids to the conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fovea.data.prompt_source import PromptedTask, RendersPrompts, SeenReply, as_sent
from fovea.rollout.base import Engine
from fovea.rollout.conversation import Conversation, Conversations, SessionLog, scored
from fovea.types import Completion, Episode, Group, Prompt, Request, SampledTurn, Sampling, TurnTokens
from fovea_gym.environments.base import Environment, Session
from fovea_gym.environments.sessions import unreadable
from fovea_gym.errors import DataError, FailedEpisodeError, UnscoredError
from fovea_gym.graders.grading import Grading
from fovea_gym.types import Message, Task, Turn
from fovea_gym.utils.event_loop import gather_or_cancel


@dataclass(frozen=True, slots=True, kw_only=True)
class Interaction:
    """The model's counterpart in an episode: the environment, the graders and the renderer of replies."""

    environment: Environment
    grading: Grading
    renderer: RendersPrompts
    max_tokens: int | None = None
    """Maximum number of tokens of an episode, prompt included; None: as many as the model has positions for."""
    seen_reply: SeenReply = as_sent
    """Changes a reply before the model sees it; an image ablation replaces the images in it."""

    @property
    def converses(self) -> bool:
        """True if an episode may have several turns or a session, instead of one answer that graders score."""
        return self.environment.max_turns > 1 or self.environment.has_sessions

    def fits(self, request: Request) -> bool:
        """True if the longest possible completion fits the token limit of an episode and the model's positions."""
        num_tokens, positions = request.prompt.num_tokens, self.renderer.most_tokens
        if positions is not None and num_tokens > positions:
            return False
        return self.max_tokens is None or num_tokens + request.sampling.max_new_tokens <= self.max_tokens


async def collect(  # noqa: PLR0913 (each argument is an independent property of the rollout)
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
    fewest: int = 1,
    for_update: bool = False,
    num_noisy: int = 0,
) -> list[Group]:
    """Collect n scored episodes of every prompt, in order; each is scored as soon as it has ended.

    A group's random numbers depend on `seed` and on its index in the step, where `num_before` groups come before the
    first one. A group with an UnscoredError is left out and the reason is appended to `unscored`; without `unscored`,
    the error is raised. An episode whose session or score fails is left out of its group and recorded in `sessions`;
    without `sessions`, the failure is raised. A group with fewer than `fewest` episodes left counts as unscored. The
    last `num_noisy` episodes of a group are sampled on its noisy prompt.
    """
    environment, indices = interaction.environment, range(num_before, num_before + len(prompted))
    talks: Conversations | None = None
    if interaction.converses:
        places = [(index, number) for index in indices for number in range(n)]
        talks = Conversations.of(environment, places, engine=engine, log=sessions, seen_reply=interaction.seen_reply)

    async def group(index: int, item: PromptedTask) -> Group | None:
        # ids and seeds do not depend on earlier calls, so that a resumed run samples the same completions
        request = Request(
            id="/".join(map(str, (*seed, index))),
            prompt=item.prompt,
            sampling=replace(sampling, seed=request_seed(*seed, index)),
            n=n,
            for_update=for_update and talks is None,
            keep=environment.max_turns > 1,
        )
        firsts = await _of_augmentations(engine, environment, item, request, num_noisy)
        try:
            if talks is None:
                found = await _single_answers(interaction.grading, item.task, firsts, sessions)
            else:
                found = await _conversations(
                    engine,
                    interaction,
                    item,
                    request=request,
                    index=index,
                    firsts=firsts,
                    talks=talks,
                    sessions=sessions,
                )
            return _group_of(item, found, fewest)
        except UnscoredError as error:
            if unscored is None:
                raise
            unscored.append(str(error))
            return None

    # concurrently, so that slow graders wait while the engine generates other groups
    groups = await gather_or_cancel(group(index, item) for index, item in zip(indices, prompted, strict=True))
    return [group for group in groups if group is not None]


async def _single_answers(
    grading: Grading, task: Task, answers: Sequence[Turn], sessions: SessionLog | None
) -> Sequence[Episode | FailedEpisodeError]:
    """Score the answers to one task; each becomes an episode of one turn."""
    if sessions is not None and grading.drops_completions:
        # each scored separately, since an answer without a score is dropped and the others remain
        episodes = (Conversation(turns=(answer,)) for answer in answers)
        return await gather_or_cancel(_scored_or_failed(grading, task, each, sessions) for each in episodes)
    scores = await grading.scores(task, [(answer,) for answer in answers])
    return [Episode(task=task, turns=(answer,), score=score) for answer, score in zip(answers, scores, strict=True)]


async def _conversations(  # noqa: PLR0913 (both parties of a conversation, and the log of its failures)
    engine: Engine,
    interaction: Interaction,
    item: PromptedTask,
    *,
    request: Request,
    index: int,
    firsts: Sequence[Turn],
    talks: Conversations,
    sessions: SessionLog | None,
) -> Sequence[Episode | FailedEpisodeError]:
    """Continue each of these first answers to `request` in a session, and score the episodes."""

    async def episode(number: int, first: Turn) -> Episode | FailedEpisodeError:
        speaker = EngineSpeaker(engine, interaction, item, request)
        conversation = await talks.go_on(
            item.task, session_seed(request, number), first, speaker, place=(index, number)
        )
        return await _scored_or_failed(interaction.grading, item.task, conversation, sessions)

    return await gather_or_cancel(episode(*each) for each in enumerate(firsts))


async def _scored_or_failed(
    grading: Grading, task: Task, conversation: Conversation, sessions: SessionLog | None
) -> Episode | FailedEpisodeError:
    """Score an episode; a failure is recorded in `sessions` and returned, or raised if `sessions` is None."""
    try:
        return await scored(grading, task, conversation)
    except FailedEpisodeError as error:
        if sessions is None:
            raise
        if conversation.failure is None:  # the scoring failed; a failed session was recorded when it ended
            sessions.failures.append(error)
        return error


def _group_of(item: PromptedTask, found: Sequence[Episode | FailedEpisodeError], fewest: int) -> Group:
    """Group the episodes that did not fail; UnscoredError if fewer than `fewest` are left."""
    episodes = tuple(each for each in found if isinstance(each, Episode))
    if len(episodes) < fewest:
        failed = [each for each in found if not isinstance(each, Episode)]
        how_many = f"all {len(found)}" if not episodes else f"all but one of {len(found)}"
        raise UnscoredError(f"{how_many} episodes failed; the last error: {failed[-1]}")
    return Group(prompt=item.prompt, episodes=episodes, masked=item.masked)


async def _of_augmentations(
    engine: Engine, environment: Environment, item: PromptedTask, request: Request, num_noisy: int
) -> Sequence[Turn]:
    """Generate the first turns of the n episodes of one task, the last `num_noisy` of them on its noisy prompt."""
    if item.noisy is None:
        return await first_turns(engine, environment, item, request)
    # the update cannot reuse recorded activations of a group that is split into two requests
    clean = replace(request, n=request.n - num_noisy, for_update=False)
    noisy = replace(
        clean,
        id=f"{request.id}/noisy",
        prompt=item.noisy,
        n=num_noisy,
        sampling=replace(request.sampling, seed=request_seed(request.sampling.seed, 3)),
    )
    parts = await gather_or_cancel(first_turns(engine, environment, item, each) for each in (clean, noisy))
    return [turn for part in parts for turn in part]


async def first_turns(engine: Engine, environment: Environment, item: PromptedTask, request: Request) -> Sequence[Turn]:
    """Generate the first turns of the n episodes of one task."""
    asked, is_noisy = tuple(environment.prompt(item.task)), request.prompt is not item.prompt
    completions = await engine.generate(request)
    return [_turn(asked, item.prompt, completion, is_noisy=is_noisy) for completion in completions]


class EngineSpeaker:
    """Generates the model's turns of one episode with an engine."""

    def __init__(self, engine: Engine, interaction: Interaction, item: PromptedTask, request: Request) -> None:
        """`request` is the one that generated the first turn."""
        self._engine = engine
        self._interaction = interaction
        self._name = item.task.id
        self._request = request
        self._most_turns = interaction.environment.turns_of(item.task)

    async def answer(self, session: Session, turns: Sequence[Turn], messages: Sequence[Message]) -> Turn | None:
        """Generate the turn after these ones; None if it might exceed the token limit of an episode."""
        spoken = [turn.tokens for turn in turns if isinstance(turn, SampledTurn)]
        where = f"turn {len(turns) + 1} of {self._name}"
        try:
            after = int(spoken[-1].completion.token_ids_T[-1])
            observation = self._interaction.renderer.observation(messages, after=after, where=where)
        except DataError as error:
            raise unreadable(session, error) from error
        request = self._next_request(spoken, observation, where)
        if not self._interaction.fits(request):
            return None
        (completion,) = await self._engine.generate(request)
        self._request = request
        return _turn(tuple(messages), observation, completion)

    def _next_request(self, spoken: Sequence[TurnTokens], observation: Prompt, where: str) -> Request:
        """Make the request for the next turn, whose prompt is the conversation so far."""
        last, before, number = spoken[-1].completion, self._request, len(spoken) + 1
        # ids are only appended: tokenizing the text of the conversation again could give other ids than the sampled
        # ones, and the recorded log-probs would then belong to other tokens
        prompt = extended(before.prompt, last.token_ids_T, observation)
        kept_L = np.concatenate(
            [ids for each in spoken for ids in (each.observation.token_ids_L, each.completion.token_ids_T)]
        )
        assert np.array_equal(prompt.token_ids_L[: len(kept_L)], kept_L), f"{where} changes the ids of earlier turns"
        # the last part of a completion's id is its number in the group, whose completions get different seeds
        seed = request_seed(before.sampling.seed, int(last.id.rpartition("/")[2]), 1)
        return Request(
            id=f"{last.id}/turn{number}",
            prompt=prompt,
            sampling=replace(before.sampling, seed=seed),
            keep=number < self._most_turns,
            continues=last.id,
        )


def extended(prompt: Prompt, answer_ids_T: NDArray[np.int64], observation: Prompt) -> Prompt:
    """Build the prompt of the next turn by appending the answer and the reply to the conversation's token ids."""
    return Prompt(
        token_ids_L=np.concatenate([prompt.token_ids_L, answer_ids_T, observation.token_ids_L]),
        unexpanded_ids_U=np.concatenate([prompt.unexpanded_ids_U, answer_ids_T, observation.unexpanded_ids_U]),
        images=prompt.images + observation.images,
    )


def request_seed(*parts: int) -> int:
    """Hash the given numbers into a 64-bit seed."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])


def session_seed(request: Request, number: int) -> int:
    """Seed of the session that continues completion `number` of an episode's first request."""
    # the 2 makes it different from the seed of the next turn
    return request_seed(request.sampling.seed, number, 2)


def _turn(
    messages: tuple[Message, ...], observation: Prompt, completion: Completion, *, is_noisy: bool = False
) -> Turn:
    return SampledTurn(
        messages=messages,
        text=completion.text,
        finish=completion.finish,
        num_tokens=len(completion.token_ids_T),
        tokens=TurnTokens(observation=observation, completion=completion, is_noisy=is_noisy),
    )
