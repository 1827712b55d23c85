"""Actions on a screenshot, as GUI-R1 has them: a type, a point for a click, a text for typing and scrolling."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from fovea.environments.grounding.reading import Numbers

_ACTION = re.compile(r"[\"']action[\"']\s{0,9}:\s{0,9}[\"']([\w /-]{1,40})[\"']")
_TEXT = re.compile(r"[\"']input_text[\"']\s{0,9}:\s{0,9}(?:\"([^\"\n]{0,2000})\"|'([^'\n]{0,2000})')")
CLICK = "click"
WITH_TEXT = ("type", "select", "scroll")
"""Actions whose text must be right, too."""
RIGHT_F1 = 0.5
"""F1 of the words from which a text is right, as in GUI-R1."""


class Action(NamedTuple):
    """The action that an answer names."""

    name: str
    text: str


def action_in(region: str) -> Action:
    """The last action of an answer, with the text behind it; empty where it names none."""
    found = list(_ACTION.finditer(region))
    if not found:
        return Action("", "")
    text = _TEXT.search(region, found[-1].start())
    return Action(found[-1][1].strip().lower(), next((part for part in text.groups() if part), "") if text else "")


def as_action(name: str, point: Numbers | None, text: str) -> str:
    """An action as GUI-R1's answers have it."""
    place = [-100, -100] if point is None else list(map(int, point))
    return str([{"action": name, "point": place, "input_text": text}])


def word_f1(text: str, truth: str) -> float:
    """F1 of the words of two texts, in any case of letters."""
    ours, theirs = Counter(text.lower().split()), Counter(truth.lower().split())
    if not ours or not theirs:
        return float(ours == theirs)
    return 2 * (ours & theirs).total() / (ours.total() + theirs.total())
