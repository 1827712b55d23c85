"""The rows of a benchmark as an environment: tasks, prompts and verdicts, which all targets of `fovea eval` share."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fovea_gym.benchmarks.base import Benchmark
from fovea_gym.environments.base import Environment, Split
from fovea_gym.environments.dataset_prompts import IMAGE_MARK
from fovea_gym.errors import ConfigError, DataError, first_line
from fovea_gym.graders.base import Grader
from fovea_gym.rows.access import RowAccess
from fovea_gym.rows.readers.base import listed
from fovea_gym.rows.rows import Rows, open_rows
from fovea_gym.types import ImageRef, Message, Score, Task, Turn


class BenchmarkEnvironment(Environment):
    """The environment of a benchmark; it has only test rows, all of which are read when it is made."""

    def __init__(self, benchmark: Benchmark, rows: Rows) -> None:
        self.benchmark = benchmark
        self.graders: tuple[Grader, ...] = (BenchmarkGrader(benchmark),)
        self._tasks = [task for index in range(len(rows)) for task in _tasks(benchmark, rows, index)]

    def tasks(self, split: Split) -> Sequence[Task]:
        if split != "test":
            raise ConfigError(
                f"{self.benchmark.name} has no {split} rows whose answers to count; compare with gold or constant:TEXT"
            )
        return self._tasks

    def prompt(self, task: Task) -> Sequence[Message]:
        """One message with the images at their marks; without marks they come first.

        As in lmms-eval, texts around marks are stripped, and the end of the text follows the last image, even if there
        are more marks than images.
        """
        *before, end = task.question.split(IMAGE_MARK)
        if not before:
            return [Message(role="user", parts=(*task.images, end))]
        parts: list[str | ImageRef] = []
        for place, image in enumerate(task.images):
            parts += [before[place].strip(), image] if place < len(before) else [image]
        return [Message(role="user", parts=tuple(part for part in (*parts, end.strip()) if part != ""))]

    def target(self, task: Task) -> str:
        return self.benchmark.target(task.row)


class BenchmarkGrader:
    """The verdicts of a benchmark, which a judge may overrule (`second_opinion`)."""

    def __init__(self, benchmark: Benchmark) -> None:
        self._benchmark = benchmark

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        return _score(right=self._benchmark.is_right(task.row, turns[-1].text))

    def overruled(self, _score_of_rule: Score, *, right: bool) -> Score:
        """The score of an answer that the judge finds right or wrong."""
        return _score(right=right)


def _score(*, right: bool) -> Score:
    return Score(reward=float(right), accuracy=float(right))


def _tasks(benchmark: Benchmark, rows: Rows, index: int) -> list[Task]:
    """The tasks of a row; DataError if it lacks something that the prompt or the verdict needs."""
    where, name = rows.where(index), f"{benchmark.name}/{index}"
    with _row_of(benchmark, where):
        parts = benchmark.rows(rows[index])
    names = [name] if len(parts) == 1 else [f"{name}.{number}" for number in range(len(parts))]
    tasks = []
    for row, name in zip(parts, names, strict=True):
        with _row_of(benchmark, where):
            question, answer, kind = benchmark.question(row), benchmark.answer(row), benchmark.kind(row)
            images = benchmark.images(row)
            benchmark.is_right(row, benchmark.target(row))  # raises if no response could be graded
        refs = rows.image_refs(index, *images)
        tasks.append(Task(id=name, question=question, answer=answer, images=refs, kind=kind, row=row))
    return tasks


@contextmanager
def _row_of(benchmark: Benchmark, where: str) -> Iterator[None]:
    """Raise DataError if the block, which reads a row, shows that it is not a row of the benchmark."""
    try:
        yield
    except (LookupError, ValueError, TypeError, SyntaxError) as error:
        raise DataError(
            f"{where}: not a row of {benchmark.name} ({first_line(error)}); download {benchmark.hub} again"
        ) from error


def open_benchmark(benchmark: Benchmark, source: str | None, access: RowAccess) -> BenchmarkEnvironment:
    """Open a benchmark's files from a folder, a file or pattern, or a data set of the hub (`NAME@SPLIT`).

    The default source is the folder `data/NAME`. DataError if the files are missing or lack a column.
    """
    name, setting, hub = benchmark.name, f"bench.{benchmark.name}", benchmark.hub
    named = source or f"data/{name}"
    if source is None and not Path(named).is_dir():
        raise DataError(
            f"bench={name}: there is no folder {named}; `hf download {hub} --repo-type dataset --local-dir {named}` "
            f"fetches it, or set {setting}=PATH"
        )
    folder = Path(named).expanduser()
    rows = open_rows(_files(benchmark, folder) if folder.is_dir() else [named], setting=setting, access=access)
    missing = [column for column in benchmark.columns if column not in rows.columns]
    if missing:
        raise DataError(
            f"{setting}: {named} has no column {listed(missing)} (its columns are {listed(rows.columns)}), so it is "
            f"not {name} as it is published; give the files of {hub}"
        )
    return BenchmarkEnvironment(benchmark, rows)


def _files(benchmark: Benchmark, folder: Path) -> list[str]:
    """The files that match the first pattern with any match in a folder."""
    for pattern in benchmark.files:
        if found := sorted(glob.glob(str(Path(glob.escape(str(folder))) / pattern))):
            return found
    raise DataError(
        f"bench.{benchmark.name}: {folder} holds no {' or '.join(benchmark.files)}; give the folder to which "
        f"{benchmark.hub} was downloaded, or its file"
    )
