"""Calls of graders that wait, for a server or for the user's code: a number of them at once, each with a timeout and
retries."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fovea.environments.graders.base import Grader, NoScoreError, TryAgainError
from fovea.errors import ScoreError, UnscoredError, first_line
from fovea.types import Score, Task, Turn
from fovea.utils.event_loop import BackgroundLoop

FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """The limits of a grader's calls, and the words for them in messages."""

    name: str
    """The grader: `mine.py:score`, `the judge at http://localhost:8000/v1`."""
    settings: str = "reward_"
    """The settings that hold these limits, up to `timeout_seconds` and `on_failure`."""
    calls_at_once: int = 1
    timeout_seconds: float = 10.0
    """For one try."""
    max_retries: int = 0
    """Further tries after a timeout or a TryAgainError, with growing pauses."""
    on_failure: Literal["error", "drop"] = "error"


class UnlimitedCalls:
    """Calls of graders that keep to limits of their own, on an event loop beside the run's."""

    def __init__(self, name: str) -> None:
        self.loop = BackgroundLoop(name)

    async def score(self, grader: Grader, task: Task, turns: Sequence[Turn]) -> Score:
        """The grader's score; to be awaited on `loop`."""
        return await grader.score(task, turns)


class LimitedCalls:
    """Calls of a run's graders within shared limits."""

    def __init__(self, limits: CallLimits) -> None:
        self.limits = limits
        self._slots = asyncio.Semaphore(limits.calls_at_once)
        # of its own: an engine that computes on the run's loop would hold up replies, and time would run out meanwhile
        self.loop = BackgroundLoop(limits.name)

    async def score(self, grader: Grader, task: Task, turns: Sequence[Turn]) -> Score:
        """The score of the first try that gives one; to be awaited on `loop`.

        Raises ScoreError where none does, UnscoredError with `on_failure: drop`.
        """
        limits = self.limits
        for num_failed in range(1, limits.max_retries + 2):
            try:
                return await self._try(grader, task, turns)
            except TryAgainError as error:
                if num_failed > limits.max_retries:
                    raise self._failure(error, num_failed) from error
            except NoScoreError as error:
                raise self._failure(error, num_failed) from error
            await asyncio.sleep(min(FIRST_PAUSE_SECONDS * 2 ** (num_failed - 1), MAX_PAUSE_SECONDS))
        raise AssertionError("the last try returns or raises")

    async def _try(self, grader: Grader, task: Task, turns: Sequence[Turn]) -> Score:
        timeout_seconds = self.limits.timeout_seconds
        try:
            async with self._slots, asyncio.timeout(timeout_seconds) as limit:
                return await grader.score(task, turns)
        except TimeoutError as error:
            if not limit.expired():  # the grader's own error, of a socket for instance
                raise NoScoreError(f"raised {first_line(error)}") from error
            text = f"took more than {self.limits.settings}timeout_seconds={timeout_seconds:g}"
            raise TryAgainError(text) from error

    def _failure(self, error: NoScoreError, num_tries: int) -> ScoreError:
        limits = self.limits
        text = f"{limits.name} {error}" + (f" in the last of {num_tries} tries" if num_tries > 1 else "")
        if limits.on_failure == "drop":
            return UnscoredError(text)
        return ScoreError(f"{text}; fix it, or set {limits.settings}on_failure=drop to leave such groups out")
