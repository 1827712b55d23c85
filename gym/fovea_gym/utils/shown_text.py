"""Sanitizing of text that is shown on a terminal or written to a run's files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

HIDDEN = "***"
"""Replacement of a password or a key."""
# C0, DEL and C1 except tab and newline, which cannot move the cursor up; and marks that change the text direction
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_USER_INFO = re.compile(r"(?<=://)[^/?#\s]+@")  # up to the last @, since a password may contain one
_KEY_IN_QUERY = re.compile(
    r"([?&][^=&#\s]*(?:key(?!word)|token|secret|password|passwd|signature|credential|auth(?!or)|\bsig)[^=&#\s]*=)[^&#\s\"']+",
    re.IGNORECASE,
)


def printable(text: str) -> str:
    """The text without control characters, with which rows and models could manipulate a terminal."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def without_secrets(text: str) -> str:
    """The text with passwords and keys in its URLs hidden: user info, and query values that look like keys."""
    if "://" not in text:
        return text
    return _KEY_IN_QUERY.sub(rf"\1{HIDDEN}", _USER_INFO.sub(f"{HIDDEN}@", text))


def tree_without_secrets(value: Any) -> Any:
    """Nested mappings and lists with `without_secrets` applied to every text."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, dict):
        return {key: tree_without_secrets(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [tree_without_secrets(entry) for entry in value]
    return value


def lacks_secrets(url: str) -> bool:
    """True if `without_secrets` has hidden a password or key of this URL."""
    return f"//{HIDDEN}@" in url or f"={HIDDEN}" in url


def without_marks(text: str, marks: Sequence[str]) -> str:
    """The text with a space in each mark, so that a tokenizer reads its letters instead of a special token.

    A policy cannot sample special tokens, but it can spell one, which would end its turn for a model that grades it.
    """
    for mark in marks:
        text = text.replace(mark, f"{mark[0]} {mark[1:]}")
    return text
