"""The server's replies to the page as plain JSON values, whether they are served or written into a file."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fovea.evaluation.records import ANSWERED_ROW, AnsweredRow, RecordedEpisode, RecordedImage
from fovea.metrics.names import definition_of
from fovea.report.curves import Curve, Totals
from fovea.report.samples import GroupSummary, IndexedStep
from fovea_gym.environments.grounding.grade import READ
from fovea_gym.environments.grounding.reading import MARK, numbers_of
from fovea_gym.types import Mark
from fovea_gym.utils.files import json_number
from fovea_gym.utils.stored import as_json

MAX_MARKS = 200
"""Maximum number of marks taken from one text: more could not be told apart on an image."""
_LABEL = re.compile(r'"label"\s*:\s*"([^"\\\n]{1,80})"')


def marks_in(text: str, image: RecordedImage | None, place: int) -> tuple[Mark, ...]:
    """The boxes and points in an answer, on the last image before it, which is the `place`-th that the model read.

    Empty if there is no image, or if its coordinate frame is not known.
    """
    if image is None or image.frame is None:
        return ()
    width, height = image.frame
    return tuple(
        Mark(
            image=place,
            xy=tuple(number / (height if axis % 2 else width) for axis, number in enumerate(numbers_of(match))),
            label=_label(text, match),
        )
        for match in islice(MARK.finditer(text), MAX_MARKS)
    )


def _label(text: str, match: re.Match[str]) -> str:
    """The label of the JSON object that holds the mark; empty if it has none."""
    start, end = text.rfind("{", 0, match.start()), text.find("}", match.end())
    if start < 0 or end < 0 or "}" in text[start : match.start()]:
        return ""
    label = _LABEL.search(text, start, end)
    return label[1] if label else ""


SIGNIFICANT = 6
"""Significant digits of a point of a curve, more than a screen can show."""


def curve_json(name: str, curve: Curve) -> dict[str, Any]:
    """A curve with the metric's name and meaning; `low` and `high` are empty if every point is a single step."""
    metric = definition_of(name)
    single = curve.lows_B is curve.means_B
    return {
        "name": name,
        "unit": metric.unit if metric else "",
        "meaning": metric.meaning if metric else "",
        "step": _numbers(curve.steps_B),
        "mean": _numbers(curve.means_B),
        "low": [] if single else _numbers(curve.lows_B),
        "high": [] if single else _numbers(curve.highs_B),
    }


def totals_json(totals: Totals) -> dict[str, Any]:
    """Running totals by step, for an axis of time or tokens."""
    return {"step": _numbers(totals.steps_B), "total": _numbers(totals.totals_B)}


def entry_json(entry: IndexedStep) -> list[Any]:
    """A step's entry in the index: `[step, [[kind, row, mean reward, least, greatest, truncated, answers], ...]]`."""
    return [entry.step, list(map(_summary_json, entry.groups))]


def step_json(step: int, records: Sequence[AnsweredRow]) -> dict[str, Any]:
    """The groups of a step; each answer has the marks found in its texts and those that its reward recorded."""
    return {"step": step, "groups": [as_json(ANSWERED_ROW, _marked(record)) for record in records]}


def _summary_json(summary: GroupSummary) -> list[Any]:
    rewards = [reward for reward in summary.rewards if math.isfinite(reward)]
    figures = (sum(rewards) / len(rewards), min(rewards), max(rewards)) if rewards else (None, None, None)
    return [summary.kind, summary.row, *figures, summary.num_truncated, len(summary.rewards)]


def _marked(record: AnsweredRow) -> AnsweredRow:
    """The record with all marks whose coordinates are finite."""

    def marks(answer: RecordedEpisode) -> Iterator[Mark]:
        yield from answer.marks
        # the environment may have marked the answer already, in its own coordinate frame
        if not any(mark.label == READ for mark in answer.marks):
            yield from _marks_of_texts(record, answer)

    drawn = ((each, (mark for mark in marks(each) if all(map(math.isfinite, mark.xy)))) for each in record.answers)
    return replace(record, answers=tuple(replace(each, marks=tuple(found)) for each, found in drawn))


def _marks_of_texts(record: AnsweredRow, answer: RecordedEpisode) -> list[Mark]:
    """Marks of all turns; images are numbered from 1 over all turns, in the order in which the model read them."""
    images: list[RecordedImage] = list(record.images)
    marks: list[Mark] = []
    for turn in answer.turns:
        images += turn.images
        marks += marks_in(turn.text, images[-1] if images else None, len(images))
    return marks


def _numbers(values: NDArray[np.float64]) -> list[float | None]:
    return [json_number(float(f"{value:.{SIGNIFICANT}g}")) for value in values.tolist()]
