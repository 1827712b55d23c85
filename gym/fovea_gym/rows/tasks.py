"""Tasks that are made on access; the kind, level and row of each task are known without making it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, overload

from fovea_gym.types import Task


class RowPlace(NamedTuple):
    """Names of the row of a task; known without making the task, even if it cannot be made."""

    key: str
    """A unique name of the row, the same in every split that holds it."""
    where: str
    """The row's name in error messages: `train.parquet row 12`."""


class LazyTasks(Sequence[Task]):
    """Tasks `make(i)` for each i of `indices`, made on access; slices are lazy as well."""

    def __init__(
        self,
        make: Callable[[int], Task],
        indices: Sequence[int],
        *,
        kind_of: Callable[[int], str],
        level_of: Callable[[int], str] | None = None,
        place_of: Callable[[int], RowPlace] | None = None,
    ) -> None:
        self._make = make
        self._indices = indices
        self._kind_of = kind_of
        self._level_of = level_of
        self._place_of = place_of

    @property
    def kinds(self) -> Sequence[str]:
        """The kind of every task, known without making the tasks."""
        return [self._kind_of(index) for index in self._indices]

    @property
    def levels(self) -> Sequence[str] | None:
        """The level of difficulty of every task; None if the tasks have no levels."""
        return None if self._level_of is None else [self._level_of(index) for index in self._indices]

    def place(self, index: int) -> RowPlace | None:
        """Names of the row of a task; None if the rows are not in a file."""
        return self._place_of(self._indices[index]) if self._place_of else None

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> LazyTasks: ...
    def __getitem__(self, index: int | slice) -> Task | LazyTasks:
        if isinstance(index, slice):
            return LazyTasks(
                self._make,
                self._indices[index],
                kind_of=self._kind_of,
                level_of=self._level_of,
                place_of=self._place_of,
            )
        return self._make(self._indices[index])


def kinds_of(tasks: Sequence[Task]) -> Sequence[str]:
    """The kind of every task; LazyTasks know their kinds without making the tasks."""
    return tasks.kinds if isinstance(tasks, LazyTasks) else [task.kind for task in tasks]


def levels_of(tasks: Sequence[Task]) -> Sequence[str] | None:
    """The level of every task; None if the tasks have no levels."""
    return tasks.levels if isinstance(tasks, LazyTasks) else None


def place_of(tasks: Sequence[Task], index: int) -> RowPlace | None:
    """Names of the row of a task; None if it is not in a file."""
    return tasks.place(index) if isinstance(tasks, LazyTasks) else None
