"""What a task is to Fovea: rows, the prompt of a row, the score of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from fovea.types import Message, Score, Task, Turn

Split: TypeAlias = Literal["train", "dev", "test"]
UNSCORED = "unscored"
"""The part of a score that is none: in a reading such an answer counts as wrong, and is counted."""


class Environment(Protocol):
    """A task family. Stateless: everything that `score` needs is in its arguments."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """The rows of a split, lazily where they are many; equal for equal settings."""
        ...

    def prompt(self, task: Task) -> Sequence[Message]:
        """What the model is asked."""
        ...

    def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        """Reward, accuracy and named parts of the answer in the last turn."""
        ...

    def target(self, task: Task) -> str:
        """An answer that scores full marks: what supervised warm-up trains on."""
        ...


@runtime_checkable
class WaitsToScore(Protocol):
    """An environment whose `score` waits for something else, such as a server.

    It is called from threads, so that drawing goes on meanwhile; which thread scores what changes no score.
    """

    @property
    def scores_at_once(self) -> int:
        """How many threads; at least 1."""
        ...
