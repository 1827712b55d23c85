"""Scores of a run's answers: the one place where a grader is called, whatever it is and however it fails."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Protocol

from fovea_gym.errors import DataError, FailedEpisodeError, ScoreError
from fovea_gym.graders.base import Grader
from fovea_gym.graders.limited_calls import LimitedCalls, UnlimitedCalls
from fovea_gym.graders.opinions import GivenScore, beside
from fovea_gym.types import Score, Task, Turn

REWARD_LIMIT = 1e6
"""Size above which a reward is an error: it would drown all others, and its square may not be finite."""


class Closes(Protocol):
    """A client to close at the end of the run."""

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Grading:
    """A run's graders, with the limits of their calls and the policy for answers that they leave without a score."""

    graders: tuple[Grader, ...]
    """One for each stage of the curriculum, or one for all; the last one scores held-out rows."""
    calls: LimitedCalls | UnlimitedCalls | None = None
    """Limits for graders that wait. None: graders that never wait, awaited in turn without a task or a thread."""
    clients: tuple[Closes, ...] = ()
    """Connections that the graders use on the loop of their calls."""
    parts: tuple[Grading, ...] = ()
    """Gradings that these graders call, closed with this one."""

    @property
    def waits(self) -> bool:
        """True if some grader may wait, and may leave an answer without a score."""
        return self.calls is not None or any(part.waits for part in self.parts)

    @property
    def drops_completions(self) -> bool:
        """True if a completion without a score may be left out of its group by itself."""
        own = isinstance(self.calls, LimitedCalls) and self.calls.limits.on_failure == "drop_completion"
        return own or any(part.drops_completions for part in self.parts)

    def at(self, stage: int) -> Grading:
        """The same with the grader of a stage of the curriculum; 0 is the first."""
        return replace(self, graders=(self.graders[stage],)) if len(self.graders) > 1 else self

    def beside(self, score: Score) -> Grading:
        """The grading of an episode to which its session gave this score, in place of the environment's graders."""
        given = GivenScore(score)
        grader = beside(self.graders[-1], given)
        return Grading(graders=(given,)) if grader is given else replace(self, graders=(grader,))

    def close(self) -> None:
        """Close the clients and stop the thread in which waiting graders are called, those of the parts included."""
        for part in self.parts:
            part.close()
        if self.calls is not None:
            self.calls.loop.close(*(client.aclose for client in self.clients))

    async def scores(self, task: Task, answers: Sequence[Sequence[Turn]]) -> list[Score]:
        """The scores of episodes of one task; ScoreError, UnscoredError to drop them, DataError for bad rewards."""
        if not self.waits:
            return [await self._score(task, turns) for turns in answers]

        async def side_by_side() -> list[Score]:
            return await asyncio.gather(*(self._score(task, turns) for turns in answers))

        return await (side_by_side() if self.calls is None else self.calls.loop.run(side_by_side()))

    async def _score(self, task: Task, turns: Sequence[Turn]) -> Score:
        grader = self.graders[-1]
        try:
            score = await (self.calls.score(grader, task, turns) if self.calls else grader.score(task, turns))
        except FailedEpisodeError as error:
            raise FailedEpisodeError(f"{task.id}: {error}", error.reason, error.reward) from error
        except ScoreError as error:
            raise type(error)(f"{task.id}: {error}") from error
        return self.checked(task, turns, score)

    def checked(self, task: Task, turns: Sequence[Turn], score: Score) -> Score:
        """A score; DataError for a reward that is not finite or beyond the limit."""
        if score.turns and len(score.turns) != len(turns):
            raise DataError(
                f"{task.id}: {len(score.turns)} rewards of turns for an episode of {len(turns)}; give one for each turn"
            )
        for reward in (score.reward, *score.turns):
            if not abs(reward) <= REWARD_LIMIT:
                # a whole number may be too large for a float, and for a text
                is_whole = isinstance(reward, int)
                is_large, size = is_whole or math.isfinite(reward), Decimal(reward) if is_whole else reward
                problem = f", beyond {REWARD_LIMIT:g}; scale it down" if is_large else "; return a finite number"
                raise DataError(f"{task.id}: the reward of {turns[-1].text[:80]!r} is {size:.6g}{problem}")
        for name in (name for parts in (score.parts, *score.image_parts) for name in parts):
            if any("\ud800" <= character <= "\udfff" for character in name):
                raise DataError(f"{task.id}: the score has a part {name!r:.60} with half a character; rename it")
        return score
