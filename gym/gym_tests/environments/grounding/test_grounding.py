"""Places on pictures: geometry, places in responses, rewards, and rendered scenes with true boxes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fovea_gym.environments.answer_end import find_answer_end
from fovea_gym.environments.base import Split
from fovea_gym.environments.grounding.geometry import (
    Box,
    average_precision,
    best_pairs,
    giou,
    iou,
    is_inside,
    most_pairs,
)
from fovea_gym.environments.grounding.grade import Placed, Rule, grade
from fovea_gym.environments.grounding.reading import Numbers, read_answer
from fovea_gym.environments.grounding.shapes import GroundingShapes
from fovea_gym.environments.shapes.scenes import SHAPES, Spot, Thing, box_of, paint
from fovea_gym.settings.grounding import REWARD_KINDS, Ask, GroundingShapesEnvironment, RewardKind
from gym_tests.grading import scored
from gym_tests.tables import table

SAME = 1e-6


def random_boxes(rng: np.random.Generator, count: int, side: int) -> list[Box]:
    corners = rng.integers(0, side, (count, 2))
    sizes = rng.integers(1, side, (count, 2))
    return [(float(x), float(y), float(x + w), float(y + h)) for (x, y), (w, h) in zip(corners, sizes, strict=True)]


def raster(box: Box, side: int) -> NDArray[np.bool_]:
    """The cells of a grid that a box of whole numbers covers."""
    cells_YX = np.zeros((side, side), dtype=bool)
    left, top, right, bottom = map(int, box)
    cells_YX[top:bottom, left:right] = True
    return cells_YX


def test_hand_computed() -> None:
    assert iou([(0, 0, 2, 2)], [(1, 1, 3, 3)])[0, 0] == pytest.approx(1 / 7)
    # the hull is 3 x 3, of which 2 cells are in neither box
    assert giou([(0, 0, 2, 2)], [(1, 1, 3, 3)])[0, 0] == pytest.approx(1 / 7 - 2 / 9)
    assert giou([(0, 0, 1, 1)], [(9, 9, 10, 10)])[0, 0] == pytest.approx(-0.98)
    assert iou([(1, 1, 1, 1)], [(1, 1, 1, 1)])[0, 0] == 0
    assert iou([], [(0, 0, 1, 1)]).shape == (0, 1)
    assert is_inside((0, 1), (0, 0, 1, 1))
    assert not is_inside((0, 1.01), (0, 0, 1, 1))


def test_equal_to_a_raster() -> None:
    """Cells counted one by one; the hull is the raster of the extreme cells."""
    rng = np.random.default_rng(0)
    ours, theirs = random_boxes(rng, 40, 20), random_boxes(rng, 40, 20)
    shares, general = iou(ours, theirs), giou(ours, theirs)
    for row, one in enumerate(ours):
        for column, other in enumerate(theirs):
            a, b = raster(one, 40), raster(other, 40)
            both, either = (a & b).sum(), (a | b).sum()
            ys, xs = np.nonzero(a | b)
            hull = (ys.max() - ys.min() + 1) * (xs.max() - xs.min() + 1)
            assert abs(shares[row, column] - both / either) < SAME
            assert abs(general[row, column] - (both / either - (hull - either) / hull)) < SAME
    size = np.array([640, 333, 640, 333])
    in_shares = iou((np.array(ours) / size).tolist(), (np.array(theirs) / size).tolist())
    assert np.abs(in_shares - shares).max() < 1e-12


@table("shape", [(1, 1), (3, 3), (2, 5), (5, 2), (4, 6), (0, 3), (3, 0)])
def test_the_best_pairs_are_those_of_all_permutations(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(3)
    for _ in range(30):
        # many ties, as IoU of boxes apart is 0
        values_NM = rng.random(shape) * (rng.random(shape) < 0.5)
        wide = values_NM if shape[0] <= shape[1] else values_NM.T
        best = max(
            sum(wide[row, column] for row, column in enumerate(columns))
            for columns in permutations(range(wide.shape[1]), wide.shape[0])
        )
        pairs = best_pairs(values_NM)
        assert len(pairs) == min(shape)
        assert len({row for row, _ in pairs}) == len({column for _, column in pairs}) == min(shape)
        assert sum(values_NM[pair] for pair in pairs) == pytest.approx(best)
        hits_NM = values_NM > 0
        assert most_pairs(hits_NM) == sum(hits_NM[pair] for pair in best_pairs(hits_NM.astype(float)))


def test_average_precision_of_a_picture() -> None:
    def ap(hits: list[list[int]]) -> float:
        return average_precision(np.array(hits, dtype=bool), np.array(hits, dtype=float))

    assert ap([[1, 0], [0, 1]]) == 1
    # right, wrong, right: precision 1 up to recall .5 (51 recalls), 2/3 after it (50)
    assert ap([[1, 0], [0, 0], [0, 1]]) == pytest.approx((51 + 50 * 2 / 3) / 101)
    assert ap([[1, 0], [1, 0]]) == pytest.approx(51 / 101)
    assert ap([[0], [1]]) == pytest.approx(0.5)
    empty = np.zeros((0, 2))
    assert (average_precision(empty > 0, empty), average_precision(empty.T > 0, empty.T)) == (0, 0)
    assert average_precision(np.zeros((0, 0), dtype=bool), np.zeros((0, 0))) == 1


BOX, POINT = (12.0, 40.0, 30.0, 60.0), (12.0, 40.0)


@table(
    "text",
    [
        *("[12, 40, 30, 60]", "12,40,30,60", "(12,40),(30,60)", "(12, 40, 30, 60)", "{'bbox': [12.0, 40, 30, 60]}"),
        '{"bbox_2d": [12, 40, 30, 60], "label": "dog"}',
        '```json\n[{"bbox_2d": [12, 40, 30, 60], "label": "dog"}]\n```',
        *("<box>(12,40),(30,60)</box>", "<box>[[12, 40, 30, 60]]</box>", "<box>12 40 30 60</box>"),
        *(r"\boxed{[12, 40, 30, 60]}", r"So \boxed{12, 40, 30, 60}.", r"\boxed{1,2,3,4} no: \boxed{12,40,30,60}"),
        "<think>Not [1, 2, 3, 4].</think><answer>[12, 40, 30, 60]</answer>",
        '<answer>```json\n{"bbox_2d": [12, 40, 30, 60]}\n```</answer>',
        *("<answer>[1,2,3,4]</answer> no: <answer>[12, 40, 30, 60]</answer>", "The box is [12, 40,\n 30, 60]."),
        *("\uff3b12\uff0c40\uff0c30\uff0c60\uff3d", "\uff0812\uff0c 40\uff09\uff0c\uff0830\uff0c60\uff09"),
        *("\u301012\u300140\u300130\u300160\u3011", "\uff11\uff12\uff0c40\uff0c30\uff0c60"),
        "[12\uff0c40\uff0c\u300030\uff0c60]",
    ],
)
def test_forms_of_one_box(text: str) -> None:
    assert read_answer(text, points=False, most=8).places == (BOX,)


@table(
    "text",
    [
        *("(12, 40)", "12,40", "[12, 40]", "<point>12 40</point>", "<point>(12, 40)</point>"),
        '{"point_2d": [12, 40], "label": "ok"}',
        "<answer>[{'action': 'click', 'point': [12, 40], 'input_text': 'no input text'}]</answer>",
    ],
)
@table("points", [True, False])
def test_one_point(text: str, points: bool) -> None:
    assert read_answer(text, points=points, most=8).places == (POINT,)


def test_forms_of_several() -> None:
    text = '[{"bbox_2d": [1, 2, 3, 4]}, {"bbox_2d": [12, 40, 30, 60]}]'
    assert read_answer(text, points=False, most=8).places == ((1, 2, 3, 4), BOX)
    assert read_answer("(1,2),(3,4)", points=True, most=8).places == ((1, 2), (3, 4))
    assert len(read_answer("[1,2,3,4]" * 99, points=False, most=8).places) == 9


@table(
    "text",
    [
        *("", "[nan, 1, 2, 3]", "[1e5, 1, 2, 3]", "[1, 2, 3]", "[1, 2, 3, 4, 5]", "[" + "9" * 30 + ", 1, 2, 3]"),
        *("[__import__('os'), 1, 2, 3]", "the red one", "12, 40, 30, 60 or so"),
    ],
)
def test_no_place(text: str) -> None:
    assert read_answer(text, points=False, most=8).places == ()


def test_an_answer_may_say_that_there_is_none() -> None:
    texts = ("<answer>[ ]</answer>", "None.", "", "[12, 40, 30, 60]")
    assert [read_answer(text, points=False, most=8).says_none for text in texts] == [True, True, False, False]


@table("piece", ["[1, ", "(1,2),", "\\boxed{", "```", "<box>", " ", "1", '"bbox":[', "<answer>", "-"])
def test_floods_are_read_in_linear_time(piece: str) -> None:
    started = perf_counter()
    read_answer(piece * (100_000 // len(piece)), points=False, most=64)
    assert perf_counter() - started < 2  # some 0.05 s where nothing else runs


FRAME = (1000.0, 1000.0)
TRUTH = ((0.1, 0.2, 0.5, 0.6),)
RULES = [(ask, reward) for ask in ("box", "boxes") for reward in REWARD_KINDS[ask]]  # type: ignore[index]


def rule(**settings: Any) -> Rule:
    return Rule(**{"ask": "box", "reward": "iou", **settings})


def graded(text: str, truth: tuple[Numbers, ...] = TRUTH, **settings: object) -> Placed:
    return grade(text, truth, FRAME, rule(**settings))


def reward(text: str, truth: tuple[Numbers, ...] = TRUTH, **settings: object) -> float:
    return graded(text, truth, **settings).reward(rule(**settings))


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
    assert reward("nothing") == reward("") == 0
    # the last box counts, and the format has one
    text = "[1,2,3,4] or [100,200,500,600]"
    assert (graded(text).accuracy, reward(text)) == (1, pytest.approx(0.9))
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
    assert grade("[0.1,0.2,0.5,0.6]", TRUTH, (1.0, 1.0), rule()).parts == {"iou": 1, "format": 1}


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
    shares = {"iou": pytest.approx(0.5), "ap50": pytest.approx(51 / 101), "precision": 1, "recall": 0.5}
    assert one.parts == {**shares, "count": 0, "format": 1}
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
@table("hedge", HEDGES)
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


SPLITS: tuple[Split, ...] = ("train", "dev", "test")


def environment(**settings: Any) -> GroundingShapes:
    return GroundingShapes(GroundingShapesEnvironment(**settings), 0)


@pytest.mark.parametrize("ask", ["box", "boxes", "point"])
@pytest.mark.parametrize("settings", [{}, {"scale": 48}, {"num_shapes": 6}])
def test_the_true_answer_earns_full_marks(ask: str, settings: dict[str, Any]) -> None:
    made = environment(ask=ask, **settings)
    for split in SPLITS:
        for task in made.tasks(split)[:30]:
            result = scored(made.graders, task, made.target(task))
            assert (result.reward, result.accuracy, result.parts["format"]) == (1, 1, 1)
            assert {mark.label for mark in result.marks} == {"truth", "answer"}
            # with stop_after_answer, a response ends with its answer, not before
            assert find_answer_end(made.target(task) + "]", made.answer_end) == len(made.target(task))


@table("shape", SHAPES)
def test_a_box_is_that_of_the_drawing(shape: Any) -> None:
    """Of the pixels that the shape has changed, to within its soft edge."""
    spot, rng = Spot(22.3, 19.6, 9.4), np.random.default_rng
    thing = Thing(shape=shape, colour="yellow")
    canvas_YXC = paint([thing], [spot], 96, rng(0))
    empty_YXC = paint([], [], 96, rng(0))
    ys, xs = np.nonzero(np.abs(canvas_YXC - empty_YXC).max(2) > 60)
    drawn = np.array([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]) / 2
    # the tip of a triangle is narrower than a pixel
    assert np.abs(drawn - np.array(box_of(thing, spot))).max() < (1.0 if shape == "triangle" else 0.6)


def test_the_question_names_one_shape_of_several() -> None:
    tasks = environment(scale=48).tasks("train")[:200]
    assert {task.question.split()[-1].rstrip("?") for task in tasks} == set(SHAPES)
    assert len({task.answer for task in tasks}) > 150
    assert all(task.answer.count("[") == 1 for task in tasks)


def test_no_scene_is_in_two_splits() -> None:
    made = environment()
    seen = {
        split: {np.asarray(task.images[0].source).tobytes() for task in made.tasks(split)[:100]} for split in SPLITS
    }
    assert seen["train"].isdisjoint(seen["dev"] | seen["test"])
    assert seen["dev"].isdisjoint(seen["test"])


def test_a_constant_box_earns_little() -> None:
    made = environment(scale=48)
    for constant in ("[17,17,31,31]", "[0,0,48,48]"):
        scores = [scored(made.graders, task, constant) for task in made.tasks("test")[:100]]
        assert np.mean([score.parts["iou"] for score in scores]) < 0.2


def test_a_reward_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="choose iou or giou or hit"):
        environment(reward_kind="f1")
