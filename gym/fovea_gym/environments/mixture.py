"""Several environments in one run, each with its own rows, prompts and graders: a mixture hands each task to its part.

A task has the id `PART/ID` and the kind `PART` or `PART/KIND`, so that metrics by question type are also by part. Parts
are sampled by their shares, whatever their numbers of rows: `MixedTasks.shares` weights kinds for `data.order.Order`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from fovea_gym.environments.access import Access, Part
from fovea_gym.environments.base import Environment, Session, Split
from fovea_gym.environments.sessions import LimitedSessions
from fovea_gym.errors import ConfigError, DataError
from fovea_gym.graders.grading import Grading
from fovea_gym.rows.tasks import LazyTasks, RowPlace, kinds_of, place_of
from fovea_gym.settings.environments import MixtureEnvironment
from fovea_gym.tools.base import Tool
from fovea_gym.types import Message, Score, Task, Turn

ALL = "all"
"""The kind of tasks whose environment does not distinguish kinds."""


class Mixture(Environment):
    """Combines the environments of `parts`; a split holds the rows of that split in all parts."""

    def __init__(self, parts: Mapping[str, Part], section: str = "") -> None:
        """`section` is the prefix of setting names in errors."""
        self.parts = parts
        self._section = section
        self.max_turns = max(part.environment.max_turns for part in parts.values())
        first, *others = [part.environment.answer_end for part in parts.values()]
        self.answer_end = first if all(end == first for end in others) else None
        self.graders = (MixtureGrader(parts, section),)
        # the smallest limit of open sessions applies to all parts
        limits = [part.environment.max_open for part in parts.values()]
        self.max_open = min((limit for limit in limits if limit is not None), default=None)

    @staticmethod
    def of(settings: MixtureEnvironment, access: Access, seed: int) -> Mixture:
        """Make a mixture of the parts in the settings, each part as in a separate run."""
        parts: dict[str, Part] = {}
        for name, part in settings.parts.by_name.items():
            if access.make_part is not None:
                parts[name] = access.make_part(name, part)
                continue
            with errors_of_part(name, access.section):
                parts[name] = part.make(access, seed)
        return Mixture(parts, access.section)

    def tasks(self, split: Split) -> Sequence[Task]:
        tasks: dict[str, Sequence[Task]] = {}
        for name, part in self.parts.items():
            with errors_of_part(name, self._section):
                tasks[name] = part.environment.tasks(split)
        return MixedTasks(tasks, self.parts)

    def prompt(self, task: Task) -> Sequence[Message]:
        part, own = part_and_task(task, self.parts)
        return part.environment.prompt(own)

    def tools(self, task: Task) -> Sequence[Tool]:
        part, own = part_and_task(task, self.parts)
        return part.environment.tools(own)

    @property
    def uses_tools(self) -> bool:
        return any(part.tools or part.environment.uses_tools for part in self.parts.values())

    def turns_of(self, task: Task) -> int:
        part, own = part_and_task(task, self.parts)
        return part.environment.turns_of(own)

    def reply(self, task: Task, turns: Sequence[Turn]) -> Sequence[Message] | None:
        part, own = part_and_task(task, self.parts)
        return part.environment.reply(own, turns)

    def target(self, task: Task) -> str:
        part, own = part_and_task(task, self.parts)
        return part.environment.target(own)

    def demonstration(self, task: Task) -> Sequence[str]:
        part, own = part_and_task(task, self.parts)
        return part.environment.demonstration(own)

    def changed(self, change: Callable[[str, Part], Environment]) -> Mixture:
        """A copy of the mixture in which `change(name, part)` gives the environment of each part."""
        changed = {name: replace(part, environment=change(name, part)) for name, part in self.parts.items()}
        return Mixture(changed, self._section)

    async def open(self, task: Task, seed: int) -> Session:
        part, own = part_and_task(task, self.parts)
        return await part.environment.open(own, seed)

    @property
    def has_sessions(self) -> bool:
        return any(part.environment.has_sessions for part in self.parts.values())

    def grading(self) -> Grading:
        return Grading(graders=self.graders, parts=tuple(part.grading for part in self.parts.values()))


def without_scores(environment: Environment) -> Environment:
    """The environment or, if its sessions score episodes, a copy whose episodes are scored by graders."""
    if isinstance(environment, Mixture):
        return environment.changed(lambda _, part: without_scores(part.environment))
    return environment.without_scores() if isinstance(environment, LimitedSessions) else environment


class MixedTasks(LazyTasks):
    """The tasks of all parts, interleaved so that every prefix holds parts in proportion to their numbers of rows."""

    def __init__(self, tasks: Mapping[str, Sequence[Task]], parts: Mapping[str, Part]) -> None:
        self._names = list(tasks)
        self._tasks = list(tasks.values())
        rows = [(number, row) for number, own in enumerate(self._tasks) for row in range(len(own))]
        # evaluations read the first rows of a split
        self._rows = sorted(rows, key=lambda place: ((place[1] + 0.5) / len(self._tasks[place[0]]), place[0]))
        self._shares = {name: parts[name].share for name in tasks}
        kinds_of_parts = [kinds_of(own) for own in self._tasks]
        kinds = [_kind(self._names[number], kinds_of_parts[number][row]) for number, row in self._rows]
        super().__init__(self._mixed, range(len(kinds)), kind_of=kinds.__getitem__)

    @property
    def shares(self) -> Mapping[str, float]:
        """The weight of each kind relative to its number of rows, so that parts are sampled by their shares."""
        num_rows = {name: len(own) for name, own in zip(self._names, self._tasks, strict=True)}
        return {kind: self._shares[part := kind.partition("/")[0]] / num_rows[part] for kind in Counter(self.kinds)}

    def place(self, index: int) -> RowPlace | None:
        number, row = self._rows[index]
        return place_of(self._tasks[number], row)

    def _mixed(self, index: int) -> Task:
        number, row = self._rows[index]
        name, task = self._names[number], self._tasks[number][row]
        return replace(task, id=f"{name}/{task.id}", kind=_kind(name, task.kind))


def with_shares(weights: Mapping[str, float], tasks: Sequence[Task]) -> Mapping[str, float]:
    """Weights of kinds, multiplied by `MixedTasks.shares` for the tasks of a mixture."""
    if not isinstance(tasks, MixedTasks):
        return weights
    return {**weights, **{kind: share * weights.get(kind, 1.0) for kind, share in tasks.shares.items()}}


class MixtureGrader:
    """The graders of all parts; a part with several stages is scored by the last stage."""

    def __init__(self, parts: Mapping[str, Part], section: str) -> None:
        self._parts = parts
        self._section = section

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        part, own = part_and_task(task, self._parts)
        with errors_of_part(task.id.partition("/")[0], self._section):
            (score,) = await part.grading.scores(own, [turns])
        return score


def part_and_task(task: Task, parts: Mapping[str, Part]) -> tuple[Part, Task]:
    """The part that a task of the mixture belongs to, and the task as its environment made it."""
    name, _, own = task.id.partition("/")
    return parts[name], replace(task, id=own, kind=task.kind.partition("/")[2] or ALL)


@contextmanager
def errors_of_part(name: str, section: str) -> Iterator[None]:
    """Prefix ConfigErrors and DataErrors with the name of the part; their text is that of a run of only this part."""
    try:
        yield
    except (ConfigError, DataError) as error:
        kind = ConfigError if isinstance(error, ConfigError) else DataError
        raise kind(f"{section}parts.{name}: {error}") from error


def _kind(name: str, kind: str) -> str:
    return name if kind == ALL else f"{name}/{kind}"
