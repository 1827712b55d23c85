"""Descriptions of a board in words, relative to the player, before and after the moves of a turn.

The words are those of VAGEN's prompts for FrozenLake and Sokoban, and the score is a mean of F1 over kinds of things,
as in VAGEN's state reward. Here, however, rules read the descriptions, not a model, and a statement counts only if both
of its relations are right.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from fovea_gym.examples.games.board import cells_of

HOW = (
    ", where <observation>box is above and left, goal is same row and same column</observation> tells the place of "
    "every box, target, goal and hole, seen from the player, and <prediction>box will be below and right</prediction> "
    "its place after the moves"
)
_PLAYER = "@+PXV"
_THINGS = {"box": "$*", "target": ".*+", "goal": "GV", "hole": "HX"}
"""The characters that show each kind of thing on a board."""
_VERTICAL, _HORIZONTAL = ("same row", "below", "above"), ("same column", "right", "left")
"""Words for the signs 0, 1 and -1 of the offset from the player."""
_WHERE = rf"(?:is|will be) ((?:{'|'.join(_VERTICAL)}) and (?:{'|'.join(_HORIZONTAL)}))\b"


def described(before: Sequence[str], after: Sequence[str]) -> str:
    """The true descriptions of a turn: `<observation>box is above and left, target is same row and right</obs...`."""
    return f"<observation>{_words(before, 'is')}</observation><prediction>{_words(after, 'will be')}</prediction>"


def description_f1(text: str, before: Sequence[str], after: Sequence[str]) -> float:
    """The mean F1 of the first observation and the first prediction in a turn's text; a missing one scores 0."""
    return (_f1(text, "observation", before) + _f1(text, "prediction", after)) / 2


def _words(lines: Sequence[str], verb: str) -> str:
    return ", ".join(f"{thing} {verb} {place}" for thing in _THINGS for place in _places(lines, thing))


def _f1(text: str, tag: str, lines: Sequence[str]) -> float:
    """The mean F1 of the statements on each kind of thing that the board or the description has."""
    description, closing, _ = text.lower().partition(f"<{tag}>")[2].partition(f"</{tag}>")
    scores = list[float]()
    for thing in _THINGS:
        said = Counter(re.findall(rf"\b{thing} {_WHERE}", description if closing else ""))
        true = Counter(_places(lines, thing))
        if said or true:
            scores.append(2 * (said & true).total() / (said.total() + true.total()))
    return fmean(scores)


def _places(lines: Sequence[str], thing: str) -> list[str]:
    ((row, column),) = cells_of(lines, _PLAYER)
    ways = [(there[0] - row, there[1] - column) for there in cells_of(lines, _THINGS[thing])]
    # the words stand in the order of the signs 0, 1, -1
    return [
        f"{_VERTICAL[(down > 0) - (down < 0)]} and {_HORIZONTAL[(right > 0) - (right < 0)]}" for down, right in ways
    ]
