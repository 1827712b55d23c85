"""Questions in any public layout: a text, or chat messages as {role, content} or {from, value}."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from fovea_gym.errors import BadRowError
from fovea_gym.graders.math_answer import last_boxed, last_tagged
from fovea_gym.types import ImageRef, Message, Role, Task

IMAGE_MARK = "<image>"
_NATIVE_MARK = "<|vision_start|><|image_pad|><|vision_end|>"
"""The place of an image as Qwen's chat templates write it; some data sets hold rendered prompts."""
_MAX_BITS = 1024  # size of the largest integers in float64; Python refuses to print much larger ones
Texts: TypeAlias = list[tuple[Role, str]]
"""Roles and texts of messages, before the images are inserted."""

_ROLES: dict[object, Role] = {
    **{"system": "system", "user": "user", "human": "user"},
    **{"assistant": "assistant", "gpt": "assistant"},
}


def bad_row(where: str, problem: str, reason: str) -> BadRowError:
    """The error for a row with this problem."""
    return BadRowError(f"{where}: {problem}", reason, "fix the row")


def never_right(answer: str, where: str) -> BadRowError:
    """The error for a row whose true answer its own grader rejects."""
    problem = f"the answer {answer[:60]!r} is wrong even when it is given word for word, so no response can be right"
    return bad_row(where, problem, "answer_never_right")


def texts_of(cell: object, where: str) -> Texts:
    """The messages of a cell; a bare text becomes a message of the user."""
    messages = cell if isinstance(cell, list | tuple) else [{"role": "user", "content": "" if cell is None else cell}]
    return [_text(message, where) for message in messages]


def ends_with_reply(cell: object) -> bool:
    """True if the last of a cell's messages is the assistant's."""
    last = cell[-1] if isinstance(cell, list | tuple) and cell else None
    return isinstance(last, Mapping) and _ROLES.get(last.get("role", last.get("from"))) == "assistant"


def check_prompt(texts: Texts, images: Sequence[ImageRef], where: str) -> None:
    """Raise BadRowError unless the prompt ends with a user's text and has a place for every image."""
    if not texts or texts[-1][0] != "user":
        last = texts[-1][0] if texts else "missing"
        raise bad_row(where, f"the last message is {last}, but a prompt must end with the user's", "prompt_role")
    if not texts[-1][1].replace(IMAGE_MARK, "").strip():
        raise bad_row(where, "the prompt is empty, so there is nothing to answer", "prompt_empty")
    interleaved(texts, images, where)


def interleaved(texts: Texts, images: Sequence[ImageRef], where: str) -> tuple[Message, ...]:
    """Messages with their images at the marks; without any mark the images come before the last text."""
    num_marks = sum(text.count(IMAGE_MARK) for _, text in texts)
    if num_marks == 0:
        *history, (role, question) = texts
        last = Message(role=role, parts=(*images, question))
        return (*(Message(role=role, parts=(text,)) for role, text in history), last)
    if num_marks != len(images):
        problem = f"{num_marks} {IMAGE_MARK} marks but {len(images)} images, which do not pair up"
        raise bad_row(where, problem, "image_marks")
    left = iter(images)
    return tuple(Message(role=role, parts=_parts(text, left)) for role, text in texts)


def plain_answer(cell: object, where: str) -> str:
    r"""The bare answer of a cell: taken out of verl's struct, and out of `\boxed{}` or `<answer>` tags."""
    if isinstance(cell, Mapping):
        cell = cell.get("ground_truth")
    if cell is None:
        raise bad_row(where, "the answer is missing, so no response can be right", "answer_missing")
    unfit = ""
    if isinstance(cell, bool) or not isinstance(cell, str | int | float):
        unfit = f"of type {type(cell).__name__}"
    elif isinstance(cell, float) and not math.isfinite(cell):
        unfit = str(cell)
    elif isinstance(cell, int) and cell.bit_length() > _MAX_BITS:
        unfit = "too large"
    if unfit:
        raise bad_row(where, f"the answer is {unfit}, not a text or a number", "answer_kind")
    text = str(cell)
    found = (last_boxed(text), last_tagged(text))
    answer = next((each for each in found if each is not None), text).strip()
    if not answer:
        raise bad_row(where, "the answer is empty, so no response can be right", "answer_missing")
    return checked_text(answer, where)


def checked_text(text: str, where: str) -> str:
    """Return the text, or raise BadRowError for one that no tokenizer can read: JSON may hold lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise bad_row(where, "the text holds half a character (a lone surrogate)", "text_damaged") from None
    return text


def _text(message: object, where: str) -> tuple[Role, str]:
    if not isinstance(message, Mapping):
        problem = f"a value of type {type(message).__name__} is not a message {{role, content}} or {{from, value}}"
        raise bad_row(where, problem, "prompt_kind")
    role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    if isinstance(content, list):
        content = "".join(_part_text(part, where) for part in content)
    if not isinstance(content, str):
        raise bad_row(where, f"the prompt is of type {type(content).__name__}, not a text", "prompt_kind")
    if not isinstance(role, str) or role not in _ROLES:
        problem = f"the role of a message is {role!r:.40}, not one of {', '.join(map(str, _ROLES))}"
        raise bad_row(where, problem, "prompt_role")
    return _ROLES[role], checked_text(content.replace(_NATIVE_MARK, IMAGE_MARK), where)


def _part_text(part: object, where: str) -> str:
    """The text of a message part in the format of chat APIs; an image, which is in a column, becomes a mark."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind == "image":
        return IMAGE_MARK
    if kind == "text" and isinstance(text, str):
        return text
    raise bad_row(where, f"a part of a message is of type {kind!r:.40}, not text or image", "prompt_kind")


def _parts(text: str, images: Iterator[ImageRef]) -> tuple[str | ImageRef, ...]:
    before, *after = text.split(IMAGE_MARK)
    parts = (before, *(part for piece in after for part in (next(images), piece)))
    return tuple(part for part in parts if part != "")


def question_of(task: Task) -> str:
    """The question without its image marks."""
    return task.question.replace(IMAGE_MARK, "").strip()
