"""Marks of a tokenizer, such as <|im_end|>, that a text spells out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def special_marks(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The texts of the special tokens of a tokenizer."""
    return [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]


def without_marks(text: str, marks: Sequence[str]) -> str:
    """The text with a space in each mark, so that a tokenizer reads the letters of it and no special token.

    A policy never draws special tokens of its own, but can spell one, and so end its turn for a model that grades it.
    """
    for mark in marks:
        text = text.replace(mark, f"{mark[0]} {mark[1:]}")
    return text
