"""The end of an answer in a response, at which completions may stop."""

from __future__ import annotations

from fovea_gym.graders.math_answer import box_end
from fovea_gym.types import AnswerEnd


def find_answer_end(text: str, end: AnswerEnd) -> int | None:
    """Index of the character after the answer; None while it has not ended."""
    start = _after(text, end.after)
    if start is None:
        return None
    found = _after(text[start:], end.closing) if end.closing else box_end(text[start:])
    return None if found is None else start + found


def _after(text: str, mark: str) -> int | None:
    place = text.find(mark)
    return None if place < 0 else place + len(mark)
