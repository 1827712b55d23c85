"""Graders: the protocol by which a run scores an episode, and the record that the built-in ones judge an answer by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fovea_gym.errors import ScoreError
from fovea_gym.types import Score, Task, Turn


class Grader(Protocol):
    """Scores an episode; stateless. `graders.grading` wraps timeouts, retries and failures around it."""

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        """The score of an episode, by its last turn; NoScoreError without one, TryAgainError if another call may."""
        ...


class NoScoreError(ScoreError):
    """A call of a grader or a session without a result. Its text goes on from a name: "raised KeyError: 'a'"."""


class TryAgainError(NoScoreError):
    """A call without a result this time, such as one to a server that is busy; it has changed nothing."""


class LateError(NoScoreError):
    """A call that took longer than its time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """The verdict on a whole response, given the truth."""

    score: float
    """0..1, before any weights of a reward."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The components of the score, by name."""
    reason: str = ""
    """One line: the answer that was read, and why it scores so."""


def weighted_turns(scores: Sequence[tuple[float, Score]], num_turns: int) -> tuple[float, ...]:
    """Rewards of turns in the weighted sum of scores, if any has some; one of a whole episode is of the last turn."""
    if not any(score.turns for _, score in scores):
        return ()
    given = [(weight, score.turns or (*[0.0] * (num_turns - 1), score.reward)) for weight, score in scores]
    return tuple(sum(weight * turns[place] for weight, turns in given) for place in range(num_turns))


def shown(text: str, limit: int = 60) -> str:
    """A model's text in one short line."""
    return repr(text if len(text) <= limit else f"{text[:limit]}...")
