"""Scenes of a small object: its shape is lost in the picture that the model sees, and found in an enlarged box."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fovea_gym.environments.base import Split
from fovea_gym.environments.shapes.scenes import SHAPES
from fovea_gym.environments.shapes.small import SmallShapes
from fovea_gym.settings.environments import SmallShapesEnvironment
from fovea_gym.types import Message, Task, Turn
from gym_tests.grading import scored

SPLITS: tuple[Split, ...] = ("train", "dev", "test")


def small(**settings: Any) -> SmallShapes:
    return SmallShapes(SmallShapesEnvironment(**settings), seed=0)


def reply(environment: SmallShapes, task: Task, *texts: str) -> Message | None:
    messages = environment.reply(task, [Turn(messages=(), text=text) for text in texts])
    return None if messages is None else messages[0]


def shown(message: Message | None) -> np.ndarray:
    assert message is not None
    return np.asarray(message.parts[0].source)  # type: ignore[union-attr]


@pytest.mark.parametrize("scale", [99, 1000])
@pytest.mark.parametrize("split", SPLITS)
def test_demonstrations_look_and_answer_right(split: Split, scale: int) -> None:
    environment = small(scale=scale)
    tasks = environment.tasks(split)[:12]
    for task in tasks:
        look, answer = environment.demonstration(task)
        assert shown(reply(environment, task, look)).shape == (48, 48, 3)
        assert reply(environment, task, look, answer) is None
        assert scored(environment.graders, task, answer).accuracy == 1
    assert [task.answer for task in tasks] == [*SHAPES] * 4
    assert small(zoom=False).demonstration(tasks[0]) == (environment.target(tasks[0]),)


def test_a_shape_is_told_by_its_enlarged_box_and_not_by_the_picture_of_the_scene() -> None:
    """Share of pixels that differ clearly from the background, inside the object's frame: square, circle, triangle."""
    environment = small()
    fills: dict[str, list[float]] = {shape: [] for shape in SHAPES}
    sizes = []
    for task in environment.tasks("test")[:60]:
        picture_YX = contrast(shown(environment.prompt(task)[0]))
        sizes.append(int((picture_YX > 40).sum()))
        box_YX = contrast(shown(reply(environment, task, environment.demonstration(task)[0]))) > 40
        rows, columns = np.flatnonzero(box_YX.any(1)), np.flatnonzero(box_YX.any(0))
        frame_YX = box_YX[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        fills[task.answer].append(float(frame_YX.mean()))
    assert max(fills["triangle"]) < min(fills["circle"])
    assert max(fills["circle"]) < min(fills["square"])
    # about three by three pixels
    assert np.mean(sizes) < 14


def contrast(pixels_YXC: np.ndarray) -> np.ndarray:
    values_YXC = pixels_YXC.astype(float)
    result: np.ndarray = np.abs(values_YXC - np.median(values_YXC, axis=(0, 1))).max(axis=2)
    return result


def test_a_box_is_cut_from_the_scene_and_enlarged() -> None:
    environment = small(scale=192)
    task = environment.tasks("train")[0]
    scene_YXC = task.images[0].source
    assert isinstance(scene_YXC, np.ndarray)
    found = shown(reply(environment, task, r"\zoom{0,48,48,96}"))
    assert (found == scene_YXC[48:96, 0:48]).all()


@pytest.mark.parametrize("box", ["5,5,5,9", "9,9,2,2", "0,0,10,1001", "0,0,3,3"])
def test_a_box_that_is_none_is_answered_by_an_error(box: str) -> None:
    environment = small()
    message = reply(environment, environment.tasks("train")[0], rf"\zoom{{{box}}}")
    assert message is not None
    assert message.failed
    assert message.parts == ("No such box: x1 below x2, y1 below y2, 43 apart, up to 1000.",)


def test_anything_else_is_an_answer() -> None:
    environment = small()
    task = environment.tasks("train")[0]
    for text in (r"\zoom{1,2,3}", r"\zoom{-1,2,300,400}", "zoom", r"\boxed{circle}", rf"\zoom{{{'1' * 5000},2,3,4}}"):
        assert reply(environment, task, text) is None


def test_no_scene_is_in_two_splits() -> None:
    seen = {split: {shown(small().prompt(task)[0]).tobytes() for task in small().tasks(split)[:40]} for split in SPLITS}
    assert seen["train"].isdisjoint(seen["dev"] | seen["test"])
