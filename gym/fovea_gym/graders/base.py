"""Graders: the protocol by which a run scores an episode, and the verdict record of the built-in graders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fovea_gym.errors import ScoreError
from fovea_gym.types import Score, Task, Turn


class Grader(Protocol):
    """Scores an episode; stateless. `graders.grading` adds time limits, retries and the handling of failures."""

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        """The score of an episode, by its last turn; NoScoreError on failure, TryAgainError if a retry may help."""
        ...


class NoScoreError(ScoreError):
    """A call of a grader or a session failed. The text continues a sentence after a name: "raised KeyError: 'a'"."""


class TryAgainError(NoScoreError):
    """A call failed without side effects and may succeed when retried, such as a call to a busy server."""


class LateError(NoScoreError):
    """A call took longer than its time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """The verdict on a whole response, given the true answer."""

    score: float
    """Score in 0..1, before the weights of a reward are applied."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The components of the score, by name."""
    reason: str = ""
    """One line with the parsed answer and the reason for its score."""


def weighted_turns(scores: Sequence[tuple[float, Score]], num_turns: int) -> tuple[float, ...]:
    """Weighted sum of per-turn rewards, empty if no score has them; a score without them counts at the last turn."""
    if not any(score.turns for _, score in scores):
        return ()
    given = [(weight, score.turns or (*[0.0] * (num_turns - 1), score.reward)) for weight, score in scores]
    return tuple(sum(weight * turns[place] for weight, turns in given) for place in range(num_turns))


def shown(text: str, limit: int = 60) -> str:
    """A model's text as one short line."""
    return repr(text if len(text) <= limit else f"{text[:limit]}...")
