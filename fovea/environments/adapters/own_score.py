"""The grader of environments whose sessions score their own episodes."""

from __future__ import annotations

from collections.abc import Sequence

from fovea.environments.graders.base import NoScoreError
from fovea.types import Score, Task, Turn


class ScoredBySession:
    """A grader for episodes without a session, such as answers in a file: it has no score for them."""

    def __init__(self, name: str) -> None:
        """`name` is that of the environment in the settings."""
        self._name = name

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        """Raises NoScoreError: the score is known only to the session in which the episode was played."""
        raise NoScoreError(f"cannot score it: environment.name={self._name} scores an episode while it is played")
