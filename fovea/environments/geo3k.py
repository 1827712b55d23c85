r"""Geometry problems with a diagram, from Parquet files in one of two public layouts.

* hub: `problem` is a text with `<image>` marks, `images` a list, `answer` is bare or `\boxed{...}`;
* verl: `prompt` is a list of {role, content}, the user's last; `reward_model` holds `ground_truth`.

Which one it is shows in the cells of `prompt_key` and `answer_key`. Some diagrams of the public test split
are in the train split too (172 of 601 rows): there a figure measures new questions, not new diagrams.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal, TypeAlias, get_args

from fovea.config import Geo3kEnvironment
from fovea.data.order import LazyTasks
from fovea.data.rows import ParquetRows, image_refs
from fovea.environments.answers import last_boxed, same_answer
from fovea.environments.base import Split
from fovea.errors import DataError
from fovea.types import ImageRef, Message, Score, Task, Turn

IMAGE_MARK = "<image>"
KIND = "all"

_Role: TypeAlias = Literal["system", "user", "assistant"]
_Texts: TypeAlias = list[tuple[_Role, str]]
_SKIP = "fix the row, or set data.on_bad_row=skip"


class Geo3k:
    """The environment `geo3k`; see `config.Geo3kEnvironment`."""

    def __init__(self, config: Geo3kEnvironment) -> None:
        self._config = config

    def tasks(self, split: Split) -> Sequence[Task]:
        rows = self._train_rows if split == "train" else self._test_rows
        indices = range(0, len(rows), 2) if split == "dev" else range(len(rows))
        return LazyTasks(lambda index: self._task(split, rows, index), indices, kind_of=lambda _: KIND)

    def prompt(self, task: Task) -> Sequence[Message]:
        history = _texts(task.row.get(self._config.prompt_key, task.question), task.id)[:-1]
        if self._config.system_prompt is not None:
            history = [("system", self._config.system_prompt), *history]
        return _interleaved([*history, ("user", task.question)], task.images, task.id)

    def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        boxed = last_boxed(turns[-1].text)
        accuracy = float(boxed is not None and same_answer(boxed, task.answer))
        formatted = float(boxed is not None)
        weight = self._config.format_weight
        return Score(
            reward=(1 - weight) * accuracy + weight * formatted,
            accuracy=accuracy,
            parts={"answer": accuracy, "format": formatted},
        )

    def target(self, task: Task) -> str:
        return rf"\boxed{{{task.answer}}}"

    @cached_property
    def _train_rows(self) -> ParquetRows:
        return self._open(self._config.train_files, "environment.train_files")

    @cached_property
    def _test_rows(self) -> ParquetRows:
        return self._open(self._config.test_files, "environment.test_files")

    def _open(self, files: Sequence[str], setting: str) -> ParquetRows:
        config = self._config
        keys = [("prompt_key", config.prompt_key), ("answer_key", config.answer_key)]
        keys += [("image_keys", key) for key in config.image_keys]
        columns = [(f"environment.{name}", key) for name, key in keys]
        return ParquetRows(files, columns=columns, setting=setting)

    def _task(self, split: Split, rows: ParquetRows, index: int) -> Task:
        row, where = rows[index], rows.where(index)
        cells = [row[key] for key in self._config.image_keys]
        images = image_refs(*cells, where=where, folder=rows.folder(index))
        texts = _texts(row[self._config.prompt_key], where)
        self._check(texts, images, where)
        return Task(
            id=f"{split}/{index}",
            question=texts[-1][1],
            answer=_answer(row[self._config.answer_key], where),
            images=images,
            kind=KIND,
            row=row,
        )

    def _check(self, texts: _Texts, images: Sequence[ImageRef], where: str) -> None:
        if not texts[-1][1].replace(IMAGE_MARK, "").strip():
            raise DataError(f"{where}: the prompt is empty, so there is nothing to answer; {_SKIP}")
        if self._config.system_prompt is not None and texts[0][0] == "system":
            raise DataError(
                f"{where}: the row has a system message, and environment.system_prompt is set too; "
                "unset environment.system_prompt"
            )
        _interleaved(texts, images, where)


def _texts(cell: object, where: str) -> _Texts:
    """The messages of a prompt cell; the last one is the user's."""
    messages = cell if isinstance(cell, list) else [{"role": "user", "content": "" if cell is None else cell}]
    texts = [_text(message, where) for message in messages]
    if not texts or texts[-1][0] != "user":
        last = texts[-1][0] if texts else "missing"
        raise DataError(f"{where}: the last message is {last}, but a prompt ends with the user's; {_SKIP}")
    return texts


def _text(message: object, where: str) -> tuple[_Role, str]:
    if not isinstance(message, Mapping):
        raise DataError(f"{where}: a value of type {type(message).__name__} is no message {{role, content}}; {_SKIP}")
    content = message.get("content")
    if not isinstance(content, str):
        raise DataError(f"{where}: the prompt is of type {type(content).__name__}, not a text; {_SKIP}")
    for role in get_args(_Role):
        if message.get("role") == role:
            return role, content
    known = ", ".join(get_args(_Role))
    raise DataError(f"{where}: the role of a message is {message.get('role')!r}, not one of {known}; {_SKIP}")


def _interleaved(texts: _Texts, images: Sequence[ImageRef], where: str) -> tuple[Message, ...]:
    """Messages with images where their marks are; without any mark they come before the last text."""
    num_marks = sum(text.count(IMAGE_MARK) for _, text in texts)
    if num_marks == 0:
        *history, (role, question) = texts
        first = Message(role=role, parts=(*images, question))
        return (*(Message(role=role, parts=(text,)) for role, text in history), first)
    if num_marks != len(images):
        raise DataError(
            f"{where}: {num_marks} {IMAGE_MARK} marks but {len(images)} images, which do not pair up; {_SKIP}"
        )
    left = iter(images)
    return tuple(Message(role=role, parts=_parts(text, left)) for role, text in texts)


def _parts(text: str, images: Iterator[ImageRef]) -> tuple[str | ImageRef, ...]:
    before, *after = text.split(IMAGE_MARK)
    parts: list[str | ImageRef] = [before]
    for piece in after:
        parts += [next(images), piece]
    return tuple(part for part in parts if part != "")


def _answer(cell: object, where: str) -> str:
    """The bare answer: out of verl's struct, out of its box."""
    if isinstance(cell, Mapping):
        cell = cell.get("ground_truth")
    if isinstance(cell, int | float) and not isinstance(cell, bool):
        cell = str(cell)
    if not isinstance(cell, str):
        raise DataError(f"{where}: the answer is of type {type(cell).__name__}, not a text or a number; {_SKIP}")
    boxed = last_boxed(cell)
    answer = (cell if boxed is None else boxed).strip()
    if not answer:
        raise DataError(f"{where}: the answer is empty, so nothing can be right; {_SKIP}")
    return answer
