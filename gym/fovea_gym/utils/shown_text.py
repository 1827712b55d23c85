"""Text as it may be shown: on a terminal, and to whoever gets to read a run's files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

HIDDEN = "***"
"""Stands for a password or a key."""
# C0, DEL and C1 but for tab and newline, which move no cursor up; and what reverses the order of letters
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_USER_INFO = re.compile(r"(?<=://)[^/?#\s]+@")  # to the last @: a password may hold one
_KEY_IN_QUERY = re.compile(
    r"([?&][^=&#\s]*(?:key(?!word)|token|secret|password|passwd|signature|credential|auth(?!or)|\bsig)[^=&#\s]*=)[^&#\s\"']+",
    re.IGNORECASE,
)


def printable(text: str) -> str:
    """The text without the characters by which rows and models could steer a terminal."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def without_secrets(text: str) -> str:
    """The text with the passwords and keys of its URLs hidden: user info, and values of queries that look like keys."""
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
    """True if a URL had a password or key that `without_secrets` has hidden."""
    return f"//{HIDDEN}@" in url or f"={HIDDEN}" in url


def without_marks(text: str, marks: Sequence[str]) -> str:
    """The text with a space in each mark, so that a tokenizer reads the letters of it and no special token.

    A policy never draws special tokens itself, but can spell one, and so end its turn for a model that grades it.
    """
    for mark in marks:
        text = text.replace(mark, f"{mark[0]} {mark[1:]}")
    return text
