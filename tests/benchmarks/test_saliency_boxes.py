"""Boxes of the objects that questions ask for, and the overlap of maps with them."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from benchmarks.saliency_boxes import Seen, asked_box, of_best, of_chance, of_map, ratio, seen
from fovea_gym.environments.shapes.environment import Shapes
from fovea_gym.settings.environments import ShapesEnvironment
from fovea_gym.types import Task
from fovea_tools.saliency.maps import AnswerMap
from fovea_tools.saliency.occluder import Saliency
from fovea_tools.saliency.occlusion import OcclusionMap


def one(falls: list[list[float]], box: tuple[float, float, float, float]) -> Seen:
    """A map of 8 x 8 px in patches of 4."""
    numbers = AnswerMap(
        id="test/0",
        question="",
        answer="\\boxed{red}",
        image=1,
        weights="",
        logprob=0.0,
        patch_px=4,
        size=(8, 8),
        falls=tuple(map(tuple, falls)),
    )
    lit = OcclusionMap(logprob=0.0, falls_RC=np.array(falls, np.float32), side_px=4)
    found = Saliency(row=0, numbers=numbers, map=lit, picture=Image.new("RGB", (8, 8)))
    return seen(found, Task(id="test/0", question="", answer="red", kind="colour"), box)


@pytest.mark.parametrize("level", [1, (1, 2), 3])
def test_the_box_is_that_of_the_object(level: object) -> None:
    settings = ShapesEnvironment.model_validate({"level": level, "test_size": 48})
    tasks = Shapes(settings, seed=3).tasks("test")
    boxes = {row: asked_box(tasks[row], row, settings) for row in range(len(tasks))}
    assert all(boxes[row] for row in boxes if tasks[row].kind in ("colour", "shape"))
    assert {tasks[row].answer for row in boxes if boxes[row] and tasks[row].kind in ("counting", "existence")} == {
        *("1", "yes")
    }
    alone = [row for row in boxes if boxes[row] and tasks[row].kind == "colour" and settings.level == 1]
    for row in alone:
        pixels_YXC = np.asarray(tasks[row].images[0].source).astype(int)
        y, x = np.nonzero(np.ptp(pixels_YXC, axis=2) > 80)  # objects are coloured, the ground is grey
        assert boxes[row] == pytest.approx((x.min(), y.min(), x.max() + 1, y.max() + 1), abs=1.5)
    assert bool(alone) == (level == 1)


def test_as_many_patches_are_taken_as_the_box_has_the_area_of() -> None:
    """A box of one patch: the right one overlaps it whole, another not at all, two drawn in four at 1/4 each."""
    right = one([[0.0, 2.0], [1.0, -1.0]], (4, 0, 8, 4))
    assert (right.number, right.is_right, right.most) == (1, True, 2.0)
    assert of_map(right, right.falls_N) == of_best(right) == 1.0
    assert of_map(right, np.array([3.0, 2.0, 1.0, 0.0])) == 0.0
    assert of_chance(right, np.random.default_rng(0)) == pytest.approx(0.25, abs=0.1)
    wide = one([[0.0, 2.0], [1.0, -1.0]], (2, 0, 8, 4))  # 24 px, 1.5 patches
    assert wide.number == 2
    assert of_map(wide, wide.falls_N) == pytest.approx(16 / 40)
    assert of_best(wide) == pytest.approx(24 / 32)


def test_a_ratio_of_means_has_an_interval() -> None:
    assert ratio(np.array([0.4, 0.6]), np.array([0.1, 0.1])) == pytest.approx((5.0, 4.0, 6.0))
    assert ratio(np.array([0.4]), np.array([0.0]))[2] == np.inf
