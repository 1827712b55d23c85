"""Checks of rows, messages and answers that the user's code returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TypeGuard, get_args

import numpy as np
from PIL import Image

from fovea_gym.errors import BadRowError, DataError
from fovea_gym.types import ImageRef, Message, Role, Task

_TEXTS = ("id", "question", "answer", "kind")
_SHOWN_CHARACTERS = 60


def check_tasks(tasks: Sequence[Task], made: str) -> None:
    """Check the rows of a split; if they are made on access, only the first, since making all may take hours."""
    if not len(tasks):
        raise DataError(f"{made} holds no rows; return some for every split")
    is_made = isinstance(tasks, list | tuple)
    ids = set[str]()
    for task in tasks if is_made else _first_made(tasks):
        if not isinstance(task, Task):
            raise DataError(f"{made} holds {_typed(task)}; return a list of fovea_gym.types.Task")
        check_task(task, made)
        if task.id in ids:
            raise DataError(f"{made} holds two rows of id {task.id!r}; give every row of a split a separate id")
        ids.add(task.id)


def _first_made(tasks: Sequence[Task]) -> Iterator[Task]:
    with suppress(BadRowError):  # a bad row is reported when the run reaches it
        yield tasks[0]


def check_task(task: Task, made: str) -> None:
    """Check that the fields of a row have the types that `Task` declares."""
    holds = f"{made} holds a Task of id {task.id!r}"
    for name in _TEXTS:
        value: object = getattr(task, name)
        if not isinstance(value, str):
            raise DataError(f"{holds} with {name}={_typed(value)}; give a text, such as {name}=str(...)")
        _check_characters(value, f"{holds} with {name}=")
    if not _is_list(task.images):
        raise DataError(f"{holds} with images={_typed(task.images)}; give a tuple, images=(ImageRef(source=...),)")
    for image in task.images:
        _check_image(image, f"{holds} with the image")


def check_messages(messages: object, made: str, otherwise: str = "") -> None:
    """Check the messages of a prompt or a reply, at least one. `otherwise` names what else may be returned."""
    fix = f'return a list of fovea_gym.types.Message, [Message(role="user", parts=(task.question,))]{otherwise}'
    if not _is_list(messages) or not messages:
        raise DataError(f"{made} returned {_typed(messages)}; {fix}")
    for message in messages:
        if not isinstance(message, Message):
            raise DataError(f"{made} returned a list that holds {_typed(message)}; {fix}")
        _check_message(message, f"{made} returned a Message")


def check_demonstration(answers: object, made: str, max_turns: int) -> None:
    """Check the model's answers in a demonstration, one for every turn."""
    if not _is_list(answers):
        raise DataError(f"{made} returned {_typed(answers)}; return a list with one text for every turn")
    for answer in answers:
        check_answer(answer, made)
    if not 1 <= len(answers) <= max_turns:
        raise DataError(
            f"{made} returned {len(answers)} answers, but an episode has 1 to max_turns={max_turns}; return one for "
            "every turn, or change max_turns"
        )


def check_answer(answer: object, made: str) -> None:
    """Check an answer that `target` or `demonstration` returned."""
    if not isinstance(answer, str):
        raise DataError(f"{made} returned the answer {_typed(answer)}; return a text")
    _check_characters(answer, f"{made} returned the answer ")


def _check_message(message: Message, returned: str) -> None:
    roles = get_args(Role)
    if message.role not in roles:
        raise DataError(f"{returned} with role={_typed(message.role)}; set one of {', '.join(roles)}")
    if not _is_list(message.parts):
        raise DataError(f"{returned} with parts={_typed(message.parts)}; give a tuple, such as parts=(task.question,)")
    for part in message.parts:
        if isinstance(part, str):
            _check_characters(part, f"{returned} with the part ")
        else:
            _check_image(part, f"{returned} with the part")


def _check_characters(text: str, found: str) -> None:
    """Raise DataError for halves of UTF-16 pairs, which `errors="surrogateescape"` and `"surrogatepass"` leave."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{found}{_typed(text)}: character {error.start} is half of a UTF-16 pair, which no tokenizer or file "
            "accepts; decode the bytes with errors='replace'"
        ) from None


def _check_image(image: object, found: str) -> None:
    if not isinstance(image, ImageRef):
        raise DataError(f"{found} {_typed(image)}; give a picture as fovea_gym.types.ImageRef(source=picture)")
    if not isinstance(image.source, bytes | str | np.ndarray | Image.Image):
        raise DataError(
            f"{found} ImageRef(source={_typed(image.source)}); give encoded bytes, a path or URL as a text, a numpy "
            "array of RGB values or a Pillow image"
        )


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    """True if a value is a list or another sequence, but not a text or bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _typed(value: object) -> str:
    shown = " ".join(repr(value).split())
    cut = shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[: _SHOWN_CHARACTERS - 3]}..."
    return f"{cut} (of type {type(value).__name__})"
