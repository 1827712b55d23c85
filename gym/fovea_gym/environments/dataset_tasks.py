"""Makes tasks and prompts of the rows of files: the common base of all environments with data files.

`FileSplits` assigns the rows to train, dev and test; reading task i reads row i, finds its columns and checks its
cells. If no setting names a column, it is the first usual one that the row has: for the question one of `PROMPT_KEYS`;
for the answer `answer` or `reward_model` (verl: its `ground_truth`), or the assistant's reply at the end of the
messages; for the images `images` or `image`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeAlias

from fovea_gym.environments.base import Environment, Split
from fovea_gym.environments.dataset_prompts import (
    Texts,
    bad_row,
    check_prompt,
    ends_with_reply,
    interleaved,
    never_right,
    plain_answer,
    texts_of,
)
from fovea_gym.environments.file_splits import FileSplits
from fovea_gym.errors import BadRowError, DataError
from fovea_gym.graders.base import Grader
from fovea_gym.rows.access import RowAccess
from fovea_gym.rows.readers.base import listed, nearest
from fovea_gym.rows.rows import Rows
from fovea_gym.settings.environments import RowsEnvironment
from fovea_gym.settings.splits import FileEnvironment
from fovea_gym.types import Message, Task

PROMPT_KEYS = ("problem", "prompt", "question", "conversations", "messages")
"""Usual columns of the question: `problem` in hiyouga/geometry3k and RLinf, `prompt` in verl."""
_IMAGE_NAME = re.compile(r"data:image/.*|\S.*\.(?:png|jpe?g|webp|gif|bmp|tiff?)", re.IGNORECASE | re.DOTALL)
_ROWS_LOOKED_AT = 10
"""Number of first rows that are read to find out what a column holds, if no setting and no usual name tells it."""

Row: TypeAlias = Mapping[str, object]
ReadAnswer: TypeAlias = Callable[[object, str], str]
"""A function that reads the true answer from a cell; its second argument is the row's name in errors."""


class FileTasks(Environment):
    """The rows of files as tasks and prompts; subclasses add the graders."""

    def __init__(
        self,
        settings: FileEnvironment,
        access: RowAccess,
        *,
        read_answer: ReadAnswer = plain_answer,
        is_gradable: Callable[[Task], bool] | None = None,
    ) -> None:
        """`is_gradable` tells whether the grader accepts a task's own answer; if it does not, the row is a bad row."""
        self._settings = settings
        self._section = access.section
        self._read_answer = read_answer
        self._is_gradable = is_gradable
        self._splits = FileSplits(settings, access, self._check)

    def tasks(self, split: Split) -> Sequence[Task]:
        kind_key, level_key = self._settings.kind_key, self._settings.level_key
        return self._splits.tasks(split, partial(self._task, split), kind_key=kind_key, level_key=level_key)

    def prompt(self, task: Task) -> Sequence[Message]:
        """The messages of a prompt: the system prompt, earlier messages, the question in its template."""
        key = prompt_key(task.row, self._settings)
        history = self._question(task.row, key, task.id)[:-1] if key else []
        return interleaved(self._framed([*history, ("user", task.question)]), task.images, task.id)

    def target(self, task: Task) -> str:
        return task.answer

    def _check(self, rows: Rows, source: str) -> None:
        check_question(self._settings, rows.columns, source, self._section)
        check_pictures(self._settings, rows, source, self._section)

    def _task(self, split: Split, rows: Rows, index: int, kind: str) -> Task:
        row, where = rows[index], rows.where(index)
        key = prompt_key(row, self._settings)
        if key is None:
            raise bad_row(where, "the row has no question", "prompt_empty")
        images = rows.image_refs(index, *image_cells(row, self._settings))
        texts = self._question(row, key, where)
        check_prompt(texts, images, where)
        if self._settings.system_prompt is not None and texts[0][0] == "system":
            setting = f"{self._section}system_prompt"
            problem = f"the row has a system message, and {setting} is set too"
            raise BadRowError(f"{where}: {problem}", "prompt_role", f"unset {setting}")
        interleaved(self._framed(texts), images, where)
        answer = self._answer(row, key, where)
        asked = texts[-1][1]
        task = Task(id=f"{split}/{index}", question=asked, answer=answer, images=images, kind=kind, row=row)
        if self._is_gradable is not None and not self._is_gradable(task):
            raise never_right(answer, where)
        return task

    def _question(self, row: Row, key: str, where: str) -> Texts:
        """The messages before the answer."""
        texts = texts_of(row.get(key), where)
        return texts[:-1] if answer_key(row, key, self._settings) == key else texts

    def _answer(self, row: Row, key: str, where: str) -> str:
        cell = self._answer_cell(row, key, where)
        try:
            return self._read_answer(cell, where)
        except BadRowError as error:
            if self._settings.answer_key is not None or set(self._settings.answer_names) & set(row) or cell is not None:
                raise
            names = self._settings.answer_names
            problem = f"no column is called {' or '.join(names)} (the columns are {listed(list(row))})"
            fix = f"set {self._section}answer_key{nearest(names, list(row))}"
            raise BadRowError(f"{where}: {problem}, so no response can be right", error.reason, fix) from None

    def _answer_cell(self, row: Row, key: str, where: str) -> object:
        answer = answer_key(row, key, self._settings)
        if answer != key:
            return row.get(answer)
        texts = texts_of(row.get(key), where)
        return texts[-1][1] if texts and texts[-1][0] == "assistant" else None

    def _framed(self, texts: Texts) -> Texts:
        settings, (role, question) = self._settings, texts[-1]
        if settings.prompt_template is not None:
            question = settings.prompt_template.replace("{prompt}", question)
        system: Texts = [] if settings.system_prompt is None else [("system", settings.system_prompt)]
        return [*system, *texts[:-1], (role, question)]


def check_question(settings: FileEnvironment, columns: Sequence[str], source: str, section: str) -> None:
    """Raise DataError if no setting names the column of the question and the rows of `source` have no usual one."""
    if settings.prompt_key is None and not set(PROMPT_KEYS) & set(columns):
        others = [column for column in columns if column not in {*settings.answer_names, *settings.image_names}]
        raise DataError(
            f"{source}: no column is called {', '.join(PROMPT_KEYS)}, so the question was not found. The columns are "
            f"{listed(columns)}; set {section}prompt_key{nearest(PROMPT_KEYS, others)}"
        )


def check_pictures(settings: FileEnvironment, rows: Rows, source: str, section: str) -> None:
    """Raise DataError if the images of `source` are in a column that no setting names and that has no usual name."""
    names = settings.image_names
    if settings.names_images or set(names) & set(rows.columns) or not len(rows):
        return
    # a question or an answer may also be the name of a file
    others = {*PROMPT_KEYS, *settings.answer_names, *(column for _, column in settings.named_columns)}
    cells = ((column, cell) for row in first_rows(rows) for column, cell in row.items() if column not in others)
    column = next((column for column, cell in cells if _holds_image(cell)), None)
    if column is not None:
        raise DataError(
            f"{source}: no column is called {' or '.join(names)}, but {column} holds images; set "
            f"{section}image_key={column}, or {section}image_keys=[] to ask without them"
        )


def first_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """The first rows of a file, except unreadable ones, which are reported when the run reaches them."""
    for index in range(min(len(rows), _ROWS_LOOKED_AT)):
        with suppress(BadRowError):
            yield rows[index]


def _holds_image(cell: object) -> bool:
    """True if a cell holds an image, the name of an image file, or a list of these."""
    if isinstance(cell, list | tuple) and cell:
        return _holds_image(cell[0])
    if isinstance(cell, Mapping):
        return isinstance(cell.get("bytes"), bytes) or _holds_image(cell.get("path"))
    return isinstance(cell, bytes) or (isinstance(cell, str) and _IMAGE_NAME.fullmatch(cell) is not None)


def check_answer(
    settings: FileEnvironment, columns: Sequence[str], rows: Sequence[Row], source: str, section: str
) -> None:
    """Raise DataError if no setting names the column of the answer, none is usual, and no row ends with a reply."""
    asked = [(row, prompt_key(row, settings)) for row in first_rows(rows)]
    has_reply = any(key is not None and ends_with_reply(row.get(key)) for row, key in asked)
    if settings.answer_key is None and not set(settings.answer_names) & set(columns) and not has_reply:
        others = [column for column in columns if column not in {*PROMPT_KEYS, *settings.image_names}]
        raise DataError(
            f"{source}: no column is called {' or '.join(settings.answer_names)}, so no response can be right. The "
            f"columns are {listed(columns)}; set {section}answer_key{nearest(settings.answer_names, others)}"
        )


def prompt_key(row: Row, settings: FileEnvironment) -> str | None:
    """The column of the question; None if the row has no usual one."""
    return settings.prompt_key or next((key for key in PROMPT_KEYS if row.get(key) is not None), None)


def answer_key(row: Row, prompt: str, settings: FileEnvironment) -> str:
    """The column of the answer; the column of the question if its messages end with a reply."""
    if settings.answer_key is not None:
        return settings.answer_key
    found = next((key for key in settings.answer_names if key in row), None)
    return found or (prompt if ends_with_reply(row.get(prompt)) else settings.answer_names[0])


def image_cells(row: Row, settings: FileEnvironment) -> list[object]:
    """The cells of the row's image columns."""
    keys = settings.image_names
    if not settings.names_images:
        keys = tuple(key for key in keys if key in row)[:1]
    return [row.get(key) for key in keys]


class OwnRows(FileTasks):
    """The environment `rows`, whose settings are `RowsEnvironment`."""

    graders: tuple[Grader, ...] = ()

    def __init__(self, config: RowsEnvironment, access: RowAccess, *, imitated: bool = False) -> None:
        """With `imitated`, for a supervised warm-up, a row without an answer is a bad row."""
        super().__init__(config, access, read_answer=plain_answer if imitated else answer_or_none)
        self.answer_key = config.answer_key


def answer_or_none(cell: object, where: str) -> str:
    """The answer if a cell holds a text or a number, else an empty text: the reward can read the cell in the row."""
    is_number = isinstance(cell, int | float) and not isinstance(cell, bool)
    return plain_answer(cell, where) if is_number or (isinstance(cell, str) and cell.strip()) else ""
