r"""Scenes with one small object, whose shape can be seen only after zooming in.

The model sees the scene scaled down to the size of its picture, in which the object is about three pixels wide: its
place is visible, its shape hardly. The reply to `\zoom{x1,y1,x2,y2}` is that box, cut from the full scene and scaled to
the size of the picture.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fovea_gym.environments.base import Environment, Split
from fovea_gym.environments.hash_splits import row_generator
from fovea_gym.environments.shapes.environment import ShapesGrader, in_box
from fovea_gym.environments.shapes.scenes import COLOURS, SHAPES, UNIT_SIDE, Spot, Thing, grid_spots, paint, with_noise
from fovea_gym.rows.tasks import LazyTasks
from fovea_gym.settings.environments import SmallShapesEnvironment
from fovea_gym.types import AnswerEnd, ImageRef, Message, Task, Turn

_ZOOM = re.compile(r"\\zoom\{(\d{1,5}),(\d{1,5}),(\d{1,5}),(\d{1,5})\}")
_SHRINK = 0.25
"""Radius of the object, relative to that of `shapes`."""
_REACH = 6.0
"""Half the side of a demonstration's box, on a scene of `UNIT_SIDE`; it enlarges the object to its size in `shapes`."""
_QUESTION = "Which shape is shown?"
"""The question of `shapes` about a single object, which the demo's model knows."""
_SCENE_SIDE_PX = 4 * UNIT_SIDE
"""Side of the full scene, from which boxes are cut; a demonstration's box is shown at full resolution."""
_SMALLEST_BOX = 1 / 24
"""Smallest side of a box, as a share of the scene's: eight pixels of 192."""


class SmallShapes(Environment):
    """The environment `shapes_small`, whose settings are `SmallShapesEnvironment`."""

    answer_end = AnswerEnd()
    graders = (ShapesGrader(),)

    def __init__(self, settings: SmallShapesEnvironment, seed: int) -> None:
        self._settings = settings
        self._seed = seed
        self.max_turns = 2 if settings.zoom else 1

    def tasks(self, split: Split) -> Sequence[Task]:
        settings = self._settings
        sizes = {"train": settings.train_size, "dev": settings.dev_size, "test": settings.test_size}
        return LazyTasks(lambda index: self._task(split, index), range(sizes[split]), kind_of=lambda _: "shape")

    def prompt(self, task: Task) -> Sequence[Message]:
        seen = self._seen(_scene(task), task.images[0].where)
        return (Message(role="user", parts=(seen, task.question)),)

    def reply(self, task: Task, turns: Sequence[Turn]) -> Sequence[Message] | None:
        """The enlarged box that the model asks for; an answer ends the episode."""
        asked = _ZOOM.fullmatch(turns[-1].text.strip())
        if asked is None or len(turns) >= self.max_turns:
            return None
        places = [int(place) / self._settings.scale for place in asked.groups()]
        if max(places) > 1 or min(places[2] - places[0], places[3] - places[1]) < _SMALLEST_BOX:
            smallest = round(_SMALLEST_BOX * self._settings.scale) + 1
            error = f"No such box: x1 below x2, y1 below y2, {smallest} apart, up to {self._settings.scale}."
            return (Message(role="user", parts=(error,), failed=True),)
        return (Message(role="user", parts=(self._seen(_cut(_scene(task), places), f"{task.id}, enlarged box"),)),)

    def target(self, task: Task) -> str:
        return in_box(task.answer)

    def demonstration(self, task: Task) -> Sequence[str]:
        """A box around the object that is asked for, then the answer."""
        if not self._settings.zoom:
            return (self.target(task),)
        box: Any = task.row["box"]
        places = ",".join(str(round(share * self._settings.scale)) for share in box)
        return (rf"\zoom{{{places}}}", self.target(task))

    def _seen(self, pixels_YXC: NDArray[np.uint8], where: str) -> ImageRef:
        picture = Image.fromarray(pixels_YXC).resize((UNIT_SIDE, UNIT_SIDE), Image.Resampling.BOX)
        return ImageRef(source=picture, where=where)

    def _task(self, split: Split, index: int) -> Task:
        rng, answer = row_generator(self._seed, split, index), SHAPES[index % len(SHAPES)]
        thing = Thing(shape=answer, colour=COLOURS[int(rng.integers(len(COLOURS)))])
        (spot,) = grid_spots(1, rng)
        canvas_YXC = paint([thing], [replace(spot, radius=spot.radius * _SHRINK)], _SCENE_SIDE_PX, rng)
        pixels_YXC = with_noise(canvas_YXC, split, rng)
        how = (
            rf" Zoom into a box with \zoom{{x1,y1,x2,y2}}, 0 to {self._settings.scale}." if self._settings.zoom else ""
        )
        return Task(
            id=f"{split}/{index}",
            question=_QUESTION + how,
            answer=answer,
            images=(ImageRef(source=pixels_YXC, where=f"shapes_small {split}/{index}"),),
            kind="shape",
            row={"box": _box_around(spot)},
        )


def _box_around(spot: Spot) -> tuple[float, float, float, float]:
    """A box around a spot, moved to lie within the scene: left, top, right, bottom in shares of the scene's side."""
    left, top = (min(max(centre - _REACH, 0), UNIT_SIDE - 2 * _REACH) for centre in (spot.x, spot.y))
    return left / UNIT_SIDE, top / UNIT_SIDE, (left + 2 * _REACH) / UNIT_SIDE, (top + 2 * _REACH) / UNIT_SIDE


def _scene(task: Task) -> NDArray[np.uint8]:
    source = task.images[0].source
    assert isinstance(source, np.ndarray), "scenes are drawn, not read"
    return source


def _cut(scene_YXC: NDArray[np.uint8], box: Sequence[float]) -> NDArray[np.uint8]:
    left, top, right, bottom = (round(share * len(scene_YXC)) for share in box)
    return scene_YXC[top:bottom, left:right]
