"""Rows of the user's own that no rule of Fovea's grades: a reward function does (`reward`)."""

from __future__ import annotations

from collections.abc import Sequence

from fovea.config.run import RowsEnvironment
from fovea.data.rows import RowAccess
from fovea.environments.base import Environment, Split
from fovea.environments.dataset_prompts import plain_answer
from fovea.environments.dataset_tasks import FileTasks
from fovea.environments.graders.base import Grader
from fovea.types import Message, Task


class OwnRows(Environment):
    """The environment `rows`; see `config.RowsEnvironment`."""

    def __init__(self, config: RowsEnvironment, access: RowAccess, *, imitated: bool = False) -> None:
        """With `imitated`, for a warm-up, a row without an answer is a bad row."""
        self._files = FileTasks(config, access, read_answer=plain_answer if imitated else answer_or_none)
        self.graders: tuple[Grader, ...] = ()
        self.answer_key = config.answer_key

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._files.tasks(split)

    def prompt(self, task: Task) -> Sequence[Message]:
        return self._files.prompt(task)

    def target(self, task: Task) -> str:
        return task.answer


def answer_or_none(cell: object, where: str) -> str:
    """The answer of a cell that holds a text or a number, else an empty text: the reward finds the cell in the row."""
    is_number = isinstance(cell, int | float) and not isinstance(cell, bool)
    return plain_answer(cell, where) if is_number or (isinstance(cell, str) and cell.strip()) else ""
