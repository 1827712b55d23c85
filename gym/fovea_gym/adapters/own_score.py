"""The grader and the seeds of environments whose sessions score their own episodes."""

from __future__ import annotations

from collections.abc import Sequence

from fovea_gym.environments.base import Split
from fovea_gym.graders.base import NoScoreError
from fovea_gym.types import Score, Task, Turn

FIRST_SEED: dict[Split, int] = {"train": 0, "dev": 1 << 24, "test": 1 << 25}
"""The seed of a split's first row; splits have at most 2**24 rows (`settings.environments.SeedRows`)."""


class ScoredBySession:
    """A grader that raises NoScoreError for episodes without a session, such as answers in a file."""

    def __init__(self, name: str) -> None:
        """`name` is the environment's name in the settings."""
        self._name = name

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        """Raises NoScoreError: the score is known only to the session in which the episode was played."""
        raise NoScoreError(f"cannot score it: the environment {self._name} scores an episode while it is played")
