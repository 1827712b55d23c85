"""Conversations between a model and an environment, turn by turn, and scoring of the resulting episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Protocol

from fovea.data.prompt_source import SeenReply, as_sent
from fovea.rollout.schedule import Place, Schedule, schedule_of
from fovea.types import Episode, EpisodeEnd, Metrics
from fovea_gym.environments.base import Environment, Session
from fovea_gym.environments.sessions import goes_on, unreadable
from fovea_gym.errors import DataError, FailedEpisodeError
from fovea_gym.graders.grading import Grading
from fovea_gym.types import Message, Score, Task, Turn


class Speaker(Protocol):
    """The model's side of one episode."""

    async def answer(self, session: Session, turns: Sequence[Turn], messages: Sequence[Message]) -> Turn | None:
        """Generate the turn after `turns` that answers these messages; None if the episode has no room for it."""
        ...


@dataclass(slots=True, kw_only=True)
class SessionLog:
    """Failed sessions of a rollout, and the time that its episodes spent waiting for the environment."""

    failures: list[FailedEpisodeError] = field(default_factory=list)
    waited_seconds: float = 0.0
    num_episodes: int = 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context manager that counts its duration as time waiting for the environment."""
        begun = perf_counter()
        try:
            yield
        finally:
            self.waited_seconds += perf_counter() - begun

    def metrics(self) -> Metrics:
        """Return the counts of failed episodes, and the mean waiting time of an episode."""
        return {**self.failed_metrics(), "seconds/replies": self.waited_seconds / max(self.num_episodes, 1)}

    def failed_metrics(self) -> Metrics:
        """Return the counts of failed episodes, in total and by reason."""
        reasons = Counter(failure.reason for failure in self.failures)
        return {
            "episodes/failed": float(len(self.failures)),
            **{f"episodes/failed_{reason}": float(count) for reason, count in sorted(reasons.items())},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A finished conversation: all turns of an episode, and how it ended."""

    turns: tuple[Turn, ...]
    end: EpisodeEnd = "done"
    score: Score | None = None
    """Score given by the session; None: graders score the episode."""
    failure: FailedEpisodeError | None = None
    """The session failure that ended the conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """The conversations of one rollout with an environment."""

    environment: Environment
    schedule: Schedule
    log: SessionLog
    seen_reply: SeenReply

    @staticmethod
    def of(
        environment: Environment,
        places: Collection[Place],
        *,
        engine: object = None,
        log: SessionLog | None = None,
        seen_reply: SeenReply = as_sent,
    ) -> Conversations:
        """Make the conversations of the episodes at these places, with the schedule that suits the engine."""
        return Conversations(
            environment=environment,
            schedule=schedule_of(engine, places, environment.max_open),
            log=SessionLog() if log is None else log,
            seen_reply=seen_reply,
        )

    async def go_on(self, task: Task, seed: int, first: Turn, speaker: Speaker, place: Place) -> Conversation:
        """Continue an episode to its end, in a session with this seed."""
        self.log.num_episodes += 1
        try:
            await self.schedule.begin(place)
            conversation = await self._in_session(task, seed, first, speaker, place)
        finally:
            self.schedule.end(place)
        if conversation.failure is not None:
            self.log.failures.append(conversation.failure)
        return conversation

    async def _in_session(self, task: Task, seed: int, first: Turn, speaker: Speaker, place: Place) -> Conversation:
        try:
            with self.log.waiting():
                session = await self.environment.open(task, seed)
        except FailedEpisodeError as error:
            return Conversation(turns=(first,), failure=error)
        turns = [first]
        try:
            end = await self._until_end(session, turns, speaker, task, place)
            return Conversation(turns=tuple(turns), end=end, score=await session.score(turns))
        except FailedEpisodeError as error:
            return Conversation(turns=tuple(turns), failure=error)
        finally:
            await session.close()

    async def _until_end(
        self, session: Session, turns: list[Turn], speaker: Speaker, task: Task, place: Place
    ) -> EpisodeEnd:
        """Append later turns to `turns` until the episode ends; returns how it ended."""
        most_turns = self.environment.turns_of(task)
        while len(turns) < most_turns:
            begun = perf_counter()
            with self.log.waiting():
                messages = await session.reply(tuple(turns))
            seconds = perf_counter() - begun
            if messages is None:
                return "done"
            await self.schedule.turn(place)
            try:
                seen = self.seen_reply(messages, f"turn {len(turns) + 1} of {task.id}")
            except DataError as error:
                raise unreadable(session, error) from error
            turn = await speaker.answer(session, turns, seen)
            if turn is None:
                return "max_tokens"
            turns.append(replace(turn, seconds=seconds))
        return "max_turns" if most_turns > 1 and await goes_on(session, tuple(turns)) else "done"


async def scored(grading: Grading, task: Task, conversation: Conversation) -> Episode:
    """Score the episode of a conversation; raises FailedEpisodeError if failed episodes are dropped."""
    failure = conversation.failure
    if failure is None:
        given = conversation.score
        (score,) = await (grading if given is None else grading.beside(given)).scores(task, [conversation.turns])
    elif failure.reward is None:
        raise failure
    else:
        score = Score(reward=failure.reward, accuracy=0.0)
    return Episode(task=task, turns=conversation.turns, score=score, end=conversation.end)
