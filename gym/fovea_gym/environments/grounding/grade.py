"""The grade of an answer that gives places on a picture: boxes or points.

All places here are in shares of the picture's width and height, which gives the same IoU as pixels.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fovea_gym.environments.grounding.geometry import (
    Box,
    Point,
    average_precision,
    best_pairs,
    centre,
    giou,
    iou,
    is_inside,
    most_pairs,
)
from fovea_gym.environments.grounding.reading import Answer, Numbers, read_answer
from fovea_gym.graders.base import Grade, shown
from fovea_gym.settings.grounding import Ask, RewardKind
from fovea_gym.types import Mark

MOST_PLACES = 64
"""Most places in an answer and in a row; an answer with more earns nothing."""
TRUTH, READ = "truth", "answer"
"""Labels of marks: true places, places of the answer."""
_HIT_IOU = 0.5
"""Smallest IoU with which a box is right, as in the accuracy of RefCOCO."""
_HIT_RADIUS = 0.14
"""Largest distance from the true point at which a point is right, as a share of the picture's sides, as in GUI-R1."""
_ROUNDING = 1e-9
"""Tolerance for rounding in the conversion to shares: an IoU that is below a limit by less than this reaches it."""
_FARTHEST = 1.0
"""Largest distance of a valid box's sides from the picture, in shares of the picture's sides."""
_NOWHERE: Box = (-9.0, -9.0, -8.0, -8.0)
"""Replaces an invalid box of an answer: it counts as a place, and overlaps nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The settings of a grade (`settings.grounding.GroundingEnvironment`)."""

    ask: Ask
    reward: RewardKind
    min_iou: float = 0.0
    format_weight: float = 0.1
    think_tags: bool = False
    answer_tags: bool = False

    @property
    def points(self) -> bool:
        return self.ask in ("point", "points")

    @property
    def single(self) -> bool:
        return self.ask in ("box", "point")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The grade of the places in an answer."""

    quality: float
    """The reward without its share for the format, 0..1."""
    accuracy: float
    parts: Mapping[str, float] = field(default_factory=dict)
    read: tuple[Numbers, ...] = ()
    """The places that were graded."""
    answer: Answer

    def reward(self, rule: Rule) -> float:
        return (1 - rule.format_weight) * self.quality + rule.format_weight * self.parts["format"]

    def marks(self, truth: Sequence[Numbers]) -> tuple[Mark, ...]:
        """Marks of true and answered places, for the report."""
        labelled = [(TRUTH, place) for place in truth] + [(READ, place) for place in self.read if place != _NOWHERE]
        return tuple(Mark(image=1, xy=place, label=label) for label, place in labelled)

    def as_grade(self, num_true: int) -> Grade:
        """The verdict without the marks, for `fovea grade`."""
        found = f"{len(self.read)} of {num_true} places"
        return Grade(
            score=self.accuracy,
            parts=self.parts,
            reason=f"{shown(self.answer.region)} has {found}: {self.accuracy:.2f}",
        )


def grade(text: str, truth: Sequence[Numbers], frame: tuple[float, float], rule: Rule) -> Placed:
    """A response against the true places; `frame` is the width and height in which the response gives coordinates.

    If one place is asked for, the last place in the answer counts; the format requires that it is the only one.
    """
    answer = read_answer(text, points=rule.points, most=MOST_PLACES)
    # where pixels or thousandths are asked for, shares of the picture are not a valid place
    places = [_NOWHERE if _are_shares(place, frame) else in_shares(place, frame) for place in answer.places]
    if len(places) > MOST_PLACES:
        places = []
    valid = [_is_place(place, rule) for place in places]
    if rule.single:
        is_formatted = valid == [True]
        places = [place for place in places[-1:] if _counts(place, rule)]
    else:
        is_formatted = all(valid) and (bool(places) or answer.says_none)
        places = [place if _counts(place, rule) else _NOWHERE for place in places]
    formatted = float(is_formatted and _is_tagged(text, answer, rule))
    # where points are asked for, a box counts as its centre
    read = [centre(_box(place)) if rule.points and len(place) == 4 else place for place in places]
    measure = {"box": _one_box, "boxes": _boxes, "point": _one_point, "points": _points}[rule.ask]
    quality, accuracy, parts = measure(read, truth, rule)
    if not truth and not answer.says_none:
        quality = accuracy = 0.0
    return Placed(
        quality=quality, accuracy=accuracy, parts={**parts, "format": formatted}, read=tuple(read), answer=answer
    )


def in_shares(place: Numbers, frame: tuple[float, float]) -> Numbers:
    """Convert a place from a frame to shares of the picture."""
    return tuple(number / frame[axis % 2] for axis, number in enumerate(place))


def _are_shares(place: Numbers, frame: tuple[float, float]) -> bool:
    """True for `[0.1, 0.2, 0.3, 0.4]` in a frame of 1000: within one unit, it must have been meant in shares."""
    return min(frame) > 1 and all(0 <= number <= 1 for number in place) and any(number % 1 for number in place)


def is_box(place: Numbers) -> bool:
    """True for a valid box, in shares of the picture: its sides are in order, and it overlaps the picture."""
    if len(place) != 4 or not all(-_FARTHEST <= number <= 1 + _FARTHEST for number in place):
        return False
    left, top, right, bottom = place
    return left < right and top < bottom and left < 1 and top < 1 and right > 0 and bottom > 0


def is_point(place: Numbers) -> bool:
    """True for a point on the picture, in shares of its sides."""
    return len(place) == 2 and all(0 <= number <= 1 for number in place)


def _is_place(place: Numbers, rule: Rule) -> bool:
    return is_point(place) if rule.points else is_box(place)


def _counts(place: Numbers, rule: Rule) -> bool:
    return is_box(place) or (rule.points and is_point(place))


def _is_tagged(text: str, answer: Answer, rule: Rule) -> bool:
    """True if the response has the tags that the format asks for."""
    thought = re.sub(r"^\s*<think>", "", text.partition("</think>")[0])
    reasons = text.count("</think>") == 1 and thought.strip() != ""
    return (reasons or not rule.think_tags) and (answer.is_tagged or not rule.answer_tags)


def _one_box(read: Sequence[Numbers], truth: Sequence[Numbers], rule: Rule) -> tuple[float, float, dict[str, float]]:
    share = float(iou([_box(read[0])], [_box(truth[0])])[0, 0]) if read else 0.0
    accuracy = float(share >= _HIT_IOU - _ROUNDING)
    if rule.reward == "giou":
        quality = (1 + float(giou([_box(read[0])], [_box(truth[0])])[0, 0])) / 2 if read else 0.0
    else:
        quality = accuracy if rule.reward == "hit" else share if share >= rule.min_iou - _ROUNDING else 0.0
    return quality, accuracy, {"iou": share}


def _boxes(read: Sequence[Numbers], truth: Sequence[Numbers], rule: Rule) -> tuple[float, float, dict[str, float]]:
    values_NM = iou([_box(place) for place in read], [_box(place) for place in truth])
    hits_NM = values_NM >= _HIT_IOU - _ROUNDING
    found = [float(values_NM[pair]) for pair in best_pairs(values_NM)]
    shares = sum(share for share in found if share >= rule.min_iou - _ROUNDING)
    f1, parts = _f1(hits_NM)
    number = len(read) + len(truth)
    quality = f1 if rule.reward == "f1" else 2 * shares / number if number else 1.0
    mean = sum(found) / len(truth) if truth else f1
    return quality, f1, {"iou": mean, "ap50": average_precision(hits_NM, values_NM), **parts}


def _one_point(read: Sequence[Numbers], truth: Sequence[Numbers], rule: Rule) -> tuple[float, float, dict[str, float]]:
    hit = float(bool(read and truth) and _hits(read[0], truth[0]))
    return hit, hit, {}


def _points(read: Sequence[Numbers], truth: Sequence[Numbers], rule: Rule) -> tuple[float, float, dict[str, float]]:
    hits = [[_hits(place, true) for true in truth] for place in read]
    f1, parts = _f1(np.array(hits, dtype=bool).reshape(len(read), len(truth)))
    return f1, f1, parts


def _f1(hits_NM: NDArray[np.bool_]) -> tuple[float, dict[str, float]]:
    """F1 of the best matching of hits, with its parts; 1 if there is neither an answer nor a true place."""
    num_answers, num_true = hits_NM.shape
    num_right = most_pairs(hits_NM)
    precision = num_right / num_answers if num_answers else float(not num_true)
    recall = num_right / num_true if num_true else float(not num_answers)
    f1 = 2 * num_right / (num_answers + num_true) if num_answers + num_true else 1.0
    return f1, {"precision": precision, "recall": recall, "count": float(num_answers == num_true)}


def _hits(place: Numbers, true: Numbers) -> bool:
    """True for a point in the true box, or near the true point."""
    if len(true) == 4:
        return is_inside(_point(place), _box(true))
    return math.dist(place, true) <= _HIT_RADIUS


def _box(place: Numbers) -> Box:
    left, top, right, bottom = place
    return left, top, right, bottom


def _point(place: Numbers) -> Point:
    x, y = place
    return x, y
