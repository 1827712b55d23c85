"""What a task is to Fovea: rows, the prompt of a row, the score of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

from fovea.types import Message, Score, Task, Turn

Split: TypeAlias = Literal["train", "dev", "test"]


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
