"""Questions of rows in a public layout: a text, or chat messages as {role, content}."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeAlias, get_args

from fovea.environments.answers import last_boxed
from fovea.errors import DataError
from fovea.types import ImageRef, Message

IMAGE_MARK = "<image>"
Role: TypeAlias = Literal["system", "user", "assistant"]
Texts: TypeAlias = list[tuple[Role, str]]
"""Messages before their images are put in."""

SKIP = "fix the row, or set data.on_bad_row=skip"


def texts_of(cell: object, where: str) -> Texts:
    """The messages of a prompt cell; the last one is the user's."""
    messages = cell if isinstance(cell, list) else [{"role": "user", "content": "" if cell is None else cell}]
    texts = [_text(message, where) for message in messages]
    if not texts or texts[-1][0] != "user":
        last = texts[-1][0] if texts else "missing"
        raise DataError(f"{where}: the last message is {last}, but a prompt ends with the user's; {SKIP}")
    return texts


def _text(message: object, where: str) -> tuple[Role, str]:
    if not isinstance(message, Mapping):
        raise DataError(f"{where}: a value of type {type(message).__name__} is no message {{role, content}}; {SKIP}")
    content = message.get("content")
    if not isinstance(content, str):
        raise DataError(f"{where}: the prompt is of type {type(content).__name__}, not a text; {SKIP}")
    for role in get_args(Role):
        if message.get("role") == role:
            return role, content
    known = ", ".join(get_args(Role))
    raise DataError(f"{where}: the role of a message is {message.get('role')!r}, not one of {known}; {SKIP}")


def interleaved(texts: Texts, images: Sequence[ImageRef], where: str) -> tuple[Message, ...]:
    """Messages with images where their marks are; without any mark they come before the last text."""
    num_marks = sum(text.count(IMAGE_MARK) for _, text in texts)
    if num_marks == 0:
        *history, (role, question) = texts
        first = Message(role=role, parts=(*images, question))
        return (*(Message(role=role, parts=(text,)) for role, text in history), first)
    if num_marks != len(images):
        raise DataError(
            f"{where}: {num_marks} {IMAGE_MARK} marks but {len(images)} images, which do not pair up; {SKIP}"
        )
    left = iter(images)
    return tuple(Message(role=role, parts=_parts(text, left)) for role, text in texts)


def _parts(text: str, images: Iterator[ImageRef]) -> tuple[str | ImageRef, ...]:
    before, *after = text.split(IMAGE_MARK)
    parts: list[str | ImageRef] = [before]
    for piece in after:
        parts += [next(images), piece]
    return tuple(part for part in parts if part != "")


def plain_answer(cell: object, where: str) -> str:
    """The bare answer: out of verl's struct, out of its box."""
    if isinstance(cell, Mapping):
        cell = cell.get("ground_truth")
    if isinstance(cell, int | float) and not isinstance(cell, bool):
        cell = str(cell)
    if not isinstance(cell, str):
        raise DataError(f"{where}: the answer is of type {type(cell).__name__}, not a text or a number; {SKIP}")
    boxed = last_boxed(cell)
    answer = (cell if boxed is None else boxed).strip()
    if not answer:
        raise DataError(f"{where}: the answer is empty, so nothing can be right; {SKIP}")
    return answer
