"""Rendered scenes with true boxes: of the drawing, in no two splits, with answers that earn full marks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fovea_gym.environments.answer_end import find_answer_end
from fovea_gym.environments.base import Split
from fovea_gym.environments.grounding.shapes import GroundingShapes
from fovea_gym.environments.shapes.scenes import SHAPES, Spot, Thing, box_of, paint
from fovea_gym.settings.grounding import GroundingShapesEnvironment
from fovea_gym.types import Task
from gym_tests.grading import scored

SPLITS: tuple[Split, ...] = ("train", "dev", "test")


def environment(**settings: Any) -> GroundingShapes:
    return GroundingShapes(GroundingShapesEnvironment(**settings), 0)


def pixels_of(task: Task) -> np.ndarray[Any, Any]:
    source = task.images[0].source
    assert isinstance(source, np.ndarray)
    return source


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


@pytest.mark.parametrize("shape", SHAPES)
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
    places = {task.answer for task in tasks}
    assert len(places) > 150
    assert all(task.answer.count("[") == 1 for task in tasks)


def test_no_scene_is_in_two_splits() -> None:
    made = environment()
    seen = {split: {pixels_of(task).tobytes() for task in made.tasks(split)[:100]} for split in SPLITS}
    assert seen["train"].isdisjoint(seen["dev"] | seen["test"])
    assert seen["dev"].isdisjoint(seen["test"])


def test_a_constant_box_earns_little() -> None:
    made = environment(scale=48)
    tasks = made.tasks("test")[:100]
    middle = np.mean([scored(made.graders, task, "[17,17,31,31]").parts["iou"] for task in tasks])
    whole = np.mean([scored(made.graders, task, "[0,0,48,48]").parts["iou"] for task in tasks])
    assert max(middle, whole) < 0.2


def test_a_reward_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="choose iou or giou or hit"):
        environment(reward_kind="f1")
