"""Rows of the user's own as tasks and prompts: what every environment with data files shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeAlias

from fovea.config import FileEnvironment
from fovea.data.order import LazyTasks
from fovea.data.rows import ParquetRows, image_refs
from fovea.environments.base import Split
from fovea.environments.questions import IMAGE_MARK, SKIP, Texts, interleaved, plain_answer, texts_of
from fovea.errors import DataError
from fovea.types import ImageRef, Message, Task

KIND = "all"

ReadAnswer: TypeAlias = Callable[[object, str], str]
"""(cell, what an error calls the row) to the true answer."""


class FileTasks:
    """The tasks of an environment's files; an environment has one and adds its grader."""

    def __init__(self, settings: FileEnvironment, *, read_answer: ReadAnswer = plain_answer) -> None:
        self._settings = settings
        self._read_answer = read_answer

    def tasks(self, split: Split) -> Sequence[Task]:
        """The rows of a split; dev is every other test row."""
        rows = self._train_rows if split == "train" else self._test_rows
        indices = range(0, len(rows), 2) if split == "dev" else range(len(rows))
        key = self._settings.kind_key
        kinds = None if key is None else [KIND if kind is None else str(kind) for kind in rows.column(key)]
        return LazyTasks(
            lambda index: self._task(split, rows, index, kinds[index] if kinds else KIND),
            indices,
            kind_of=lambda index: kinds[index] if kinds else KIND,
        )

    def prompt(self, task: Task) -> Sequence[Message]:
        """What the model is asked."""
        history = texts_of(task.row.get(self._settings.prompt_key, task.question), task.id)[:-1]
        if self._settings.system_prompt is not None:
            history = [("system", self._settings.system_prompt), *history]
        return interleaved([*history, ("user", task.question)], task.images, task.id)

    @cached_property
    def _train_rows(self) -> ParquetRows:
        return self._open(self._settings.train_files, "environment.train_files")

    @cached_property
    def _test_rows(self) -> ParquetRows:
        return self._open(self._settings.test_files, "environment.test_files")

    def _open(self, files: Sequence[str], setting: str) -> ParquetRows:
        config = self._settings
        keys = [("prompt_key", config.prompt_key), ("answer_key", config.answer_key)]
        keys += [("image_keys", key) for key in config.image_keys]
        keys += [("kind_key", config.kind_key)] if config.kind_key is not None else []
        columns = [(f"environment.{name}", key) for name, key in keys]
        return ParquetRows(files, columns=columns, setting=setting)

    def _task(self, split: Split, rows: ParquetRows, index: int, kind: str) -> Task:
        row, where = rows[index], rows.where(index)
        cells = [row[key] for key in self._settings.image_keys]
        images = image_refs(*cells, where=where, folder=rows.folder(index))
        texts = texts_of(row[self._settings.prompt_key], where)
        self._check(texts, images, where)
        return Task(
            id=f"{split}/{index}",
            question=texts[-1][1],
            answer=self._read_answer(row[self._settings.answer_key], where),
            images=images,
            kind=kind,
            row=row,
        )

    def _check(self, texts: Texts, images: Sequence[ImageRef], where: str) -> None:
        if not texts[-1][1].replace(IMAGE_MARK, "").strip():
            raise DataError(f"{where}: the prompt is empty, so there is nothing to answer; {SKIP}")
        if self._settings.system_prompt is not None and texts[0][0] == "system":
            raise DataError(
                f"{where}: the row has a system message, and environment.system_prompt is set too; "
                "unset environment.system_prompt"
            )
        interleaved(texts, images, where)
