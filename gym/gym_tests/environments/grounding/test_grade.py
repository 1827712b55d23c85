"""Rewards of places: hand-computed, and less for ten kinds of hedges than for an honest guess."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fovea_gym.environments.grounding.grade import Placed, Rule, grade
from fovea_gym.environments.grounding.reading import Numbers
from fovea_gym.settings.grounding import REWARD_KINDS, Ask, RewardKind
from gym_tests.tables import table

FRAME = (1000.0, 1000.0)
TRUTH = ((0.1, 0.2, 0.5, 0.6),)
RULES = [(ask, reward) for ask in ("box", "boxes") for reward in REWARD_KINDS[ask]]  # type: ignore[index]


def graded(text: str, truth: tuple[Numbers, ...] = TRUTH, **settings: object) -> Placed:
    rule: dict[str, object] = {"ask": "box", "reward": "iou", **settings}
    return grade(text, truth, FRAME, Rule(**rule))  # type: ignore[arg-type]


def reward(text: str, truth: tuple[Numbers, ...] = TRUTH, **settings: object) -> float:
    rule: dict[str, object] = {"ask": "box", "reward": "iou", **settings}
    return graded(text, truth, **settings).reward(Rule(**rule))  # type: ignore[arg-type]


def test_one_box() -> None:
    assert reward("[100,200,500,600]") == 1
    half = "[100,200,300,600]"
    assert graded(half).parts == {"iou": pytest.approx(0.5), "format": 1}
    assert graded(half).accuracy == 1
    assert reward(half) == pytest.approx(0.9 * 0.5 + 0.1)
    assert reward(half, reward="hit") == 1
    assert reward(half, min_iou=0.6) == pytest.approx(0.1)
    # intersection and union in cells of a tenth: 4 and 28, in a hull of 36
    corner = "[300,400,700,800]"
    assert reward(corner, reward="giou", format_weight=0) == pytest.approx((1 + 4 / 28 - 8 / 36) / 2)
    assert reward("nothing") == 0
    assert reward("") == 0


def test_the_last_box_counts_and_the_format_has_one() -> None:
    text = "[1,2,3,4] or [100,200,500,600]"
    assert graded(text).accuracy == 1
    assert reward(text) == pytest.approx(0.9)
    assert reward("<think>[1,2,3,4]?</think>[100,200,500,600]") == 1


@table(
    ("text", "settings"),
    [
        ("[0.1,0.2,0.5,0.6]", {}),
        ("[0, 0, 1, 0.5]", {}),
        ('[{"bbox_2d": [0.1, 0.2, 0.5, 0.6]}]', {"ask": "boxes", "reward": "f1"}),
        ("[0.05,0.02]", {"ask": "point", "reward": "hit", "truth": ((0.0, 0.0, 0.1, 0.1),)}),
        ("[0.05,0.02]", {"ask": "points", "reward": "f1", "truth": ((0.0, 0.0, 0.1, 0.1),)}),
    ],
)
def test_shares_of_the_picture_earn_nothing_where_thousandths_are_asked(text: str, settings: dict[str, Any]) -> None:
    assert reward(text, **settings) == 0


def test_whole_numbers_and_frames_of_shares_are_as_they_were() -> None:
    corner = ((0.0, 0.0, 0.001, 0.001),)
    assert reward("[0,0,1,1]", corner) == 1
    assert reward("[100.5,200.5,500.5,600.5]") > 0.98
    assert grade("[0.1,0.2,0.5,0.6]", TRUTH, (1.0, 1.0), Rule(ask="box", reward="iou")).parts == {"iou": 1, "format": 1}


def test_tags_of_the_format() -> None:
    answer, tagged = "[100,200,500,600]", "<answer>[100,200,500,600]</answer>"
    assert reward(answer, answer_tags=True) == pytest.approx(0.9)
    assert reward(tagged, answer_tags=True) == 1
    assert reward(tagged, answer_tags=True, think_tags=True) == pytest.approx(0.9)
    assert reward(f"<think>hm</think>{tagged}", answer_tags=True, think_tags=True) == 1
    assert reward(f"<think></think>{tagged}", think_tags=True) == pytest.approx(0.9)


def test_several_boxes() -> None:
    truth = ((0.1, 0.1, 0.2, 0.2), (0.5, 0.5, 0.9, 0.9))
    both = "[[500,500,900,900],[100,100,200,200]]"
    assert reward(both, truth, ask="boxes", reward="f1") == 1
    one = graded("[100,100,200,200]", truth, ask="boxes", reward="f1")
    assert one.accuracy == pytest.approx(2 / 3)
    assert one.parts == {
        "iou": pytest.approx(0.5),
        "ap50": pytest.approx(51 / 101),
        "precision": 1,
        "recall": 0.5,
        "count": 0,
        "format": 1,
    }
    assert graded(both[:-1] + ",[0,0,10,10]]", truth, ask="boxes", reward="f1").accuracy == pytest.approx(4 / 5)
    assert graded("[500,500,900,700]", truth, ask="boxes", reward="iou").quality == pytest.approx(2 * 0.5 / 3)
    assert graded("[500,500,900,700]" * 65, truth, ask="boxes", reward="iou").quality == 0


def test_a_picture_may_have_none() -> None:
    assert reward("[]", (), ask="boxes", reward="f1") == 1
    assert reward("None", (), ask="boxes", reward="iou") == 1
    assert reward("I do not know", (), ask="boxes", reward="f1") == 0
    assert reward("[1,2,3,4]", (), ask="boxes", reward="f1") == pytest.approx(0.1)
    assert reward("[]", TRUTH, ask="boxes", reward="f1") == pytest.approx(0.1)


def test_points() -> None:
    assert reward("(300,400)", ask="point", reward="hit") == 1
    assert reward("(300,601)", ask="point", reward="hit") == pytest.approx(0.1)
    # the centre of a box is a point, out of form
    assert reward("[100,200,500,600]", ask="point", reward="hit") == pytest.approx(0.9)
    assert reward("(600,100)", ((0.5, 0.1),), ask="point", reward="hit") == 1
    assert reward("(650,100)", ((0.5, 0.1),), ask="point", reward="hit") == pytest.approx(0.1)
    truth = ((0.1, 0.1, 0.2, 0.2), (0.5, 0.5, 0.9, 0.9))
    assert reward("(550,550), (150,150)", truth, ask="points", reward="f1") == 1
    assert graded("(550,550), (560,560)", truth, ask="points", reward="f1").accuracy == 0.5


def test_marks_are_the_truth_and_the_answer_that_was_read() -> None:
    marks = graded("[1,2,3,4] [100,200,500,600]").marks(TRUTH)
    assert [(mark.label, mark.xy) for mark in marks] == [("truth", TRUTH[0]), ("answer", TRUTH[0])]
    outside = graded("[[2000,2000,2100,2100],[100,200,500,600]]", ask="boxes", reward="f1")
    assert [mark.label for mark in outside.marks(TRUTH)] == ["truth", "answer"]


def written(box: Numbers) -> str:
    return f"[{','.join(str(round(1000 * number)) for number in box)}]"


def guess(box: Numbers, rng: np.random.Generator) -> str:
    """An honest guess: each side off by about an eighth of the box's."""
    sides = np.array([box[2] - box[0], box[3] - box[1]] * 2)
    left, top, right, bottom = np.array(box) + rng.normal(0, 0.125, 4) * sides
    return written((left, top, max(right, left + 0.01), max(bottom, top + 0.01)))


def grid(rng: np.random.Generator) -> str:
    return "".join(f"[{x},{y},{x + 250},{y + 250}]" for x in range(0, 1000, 250) for y in range(0, 1000, 250))


HEDGES: dict[str, Callable[[Numbers, np.random.Generator], str]] = {
    "the whole picture": lambda _box, _rng: "[0,0,1000,1000]",
    "many boxes": lambda _box, rng: grid(rng),
    "overlapping boxes": lambda box, rng: "".join(guess(box, rng) for _ in range(5)),
    "the same box repeated": lambda box, rng: guess(box, rng) * 4,
    "a degenerate box": lambda box, rng: written((box[0], box[1], box[0], box[1])),
    "a negative box": lambda box, _rng: "[-900,-900,1900,1900]",
    "an inverted box": lambda box, _rng: written((box[2], box[3], box[0], box[1])),
    "not a number": lambda _box, _rng: "[nan, nan, inf, inf]",
    "a huge box": lambda _box, _rng: "[0,0,999999999,999999999]",
    "a box beside the picture": lambda box, _rng: written((box[0] + 1, box[1] + 1, box[2] + 1, box[3] + 1)),
    "a point where a box is asked": lambda box, _rng: written(((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)),
    "two different answers": lambda box, rng: guess(box, rng) + " or " + guess(box, rng),
}


@pytest.mark.parametrize(("ask", "kind"), RULES)
@pytest.mark.parametrize("hedge", HEDGES)
def test_a_hedge_earns_less_than_an_honest_guess(hedge: str, ask: Ask, kind: RewardKind) -> None:
    rng = np.random.default_rng(5)
    hedged, honest = [], []
    for _ in range(200):
        x, y, width, height = rng.random(4) * (0.6, 0.6, 0.35, 0.35)
        box = (x, y, x + width + 0.05, y + height + 0.05)
        honest.append(reward(guess(box, rng), (box,), ask=ask, reward=kind))
        hedged.append(reward(HEDGES[hedge](box, rng), (box,), ask=ask, reward=kind))
    assert np.mean(honest) > 0.5
    assert np.mean(hedged) < np.mean(honest) - 0.05
