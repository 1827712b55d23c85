"""Rendered scenes that ask where a shape is; the true boxes are those of the drawing, rounded like answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fovea_gym.environments.base import Environment, Split
from fovea_gym.environments.grounding.geometry import Box, centre
from fovea_gym.environments.grounding.grade import Rule, grade, in_shares
from fovea_gym.environments.grounding.reading import Numbers
from fovea_gym.environments.hash_splits import row_generator
from fovea_gym.environments.shapes.scenes import (
    COLOURS,
    SHAPES,
    UNIT_SIDE,
    Spot,
    Thing,
    box_of,
    grid_spots,
    paint,
    with_noise,
)
from fovea_gym.rows.tasks import LazyTasks
from fovea_gym.settings.grounding import REWARD_KINDS, GroundingShapesEnvironment
from fovea_gym.types import AnswerEnd, ImageRef, Message, Score, Task, Turn

_PLACES = "places"
"""Key of the task's row that holds its true boxes, in the coordinates of answers."""


class GroundingShapes(Environment):
    """The environment `grounding_shapes`, whose settings are `GroundingShapesEnvironment`."""

    def __init__(self, settings: GroundingShapesEnvironment, seed: int) -> None:
        self._settings = settings
        self._seed = seed
        self.answer_end = AnswerEnd(closing="]]" if settings.ask == "boxes" else "]")
        self.graders = (GroundingShapesGrader(settings),)

    def tasks(self, split: Split) -> Sequence[Task]:
        settings = self._settings
        sizes = {"train": settings.train_size, "dev": settings.dev_size, "test": settings.test_size}
        return LazyTasks(lambda index: self._task(split, index), range(sizes[split]), kind_of=lambda _: settings.ask)

    def prompt(self, task: Task) -> Sequence[Message]:
        return (Message(role="user", parts=(*task.images, task.question)),)

    def target(self, task: Task) -> str:
        return task.answer

    def _task(self, split: Split, index: int) -> Task:
        settings, rng = self._settings, row_generator(self._seed, split, index)
        kinds = rng.permutation(len(COLOURS) * len(SHAPES))[: settings.num_shapes]
        things = [Thing(colour=COLOURS[kind // len(SHAPES)], shape=SHAPES[kind % len(SHAPES)]) for kind in kinds]
        spots = grid_spots(len(things), rng)
        canvas_YXC = paint(things, spots, UNIT_SIDE, rng)
        pixels_YXC = with_noise(canvas_YXC, split, rng)
        asked = things[0]
        boxes = [self._box(thing, spot) for thing, spot in zip(things, spots, strict=True)]
        if settings.ask == "boxes":
            question = f"Where is everything {asked.colour}?"
            boxes = sorted(box for thing, box in zip(things, boxes, strict=True) if thing.colour == asked.colour)
        else:
            question, boxes = f"Where is the {asked.colour} {asked.shape}?", boxes[:1]
        return Task(
            id=f"{split}/{index}",
            question=question,
            answer=self._written(boxes),
            images=(ImageRef(source=pixels_YXC, where=f"grounding_shapes {split}/{index}"),),
            kind=settings.ask,
            row={_PLACES: tuple(boxes)},
        )

    def _box(self, thing: Thing, spot: Spot) -> Box:
        """The box around a thing, in the whole-number coordinates of answers."""
        scale = self._settings.scale
        left, top, right, bottom = (min(max(round(side * scale / UNIT_SIDE), 0), scale) for side in box_of(thing, spot))
        return left, top, right, bottom

    def _written(self, boxes: Sequence[Box]) -> str:
        numbers: list[Numbers] = [centre(box) if self._settings.ask == "point" else box for box in boxes]
        written = [f"[{','.join(str(int(number)) for number in place)}]" for place in numbers]
        return "".join(written) if self._settings.ask != "boxes" else f"[{','.join(written)}]"


class GroundingShapesGrader:
    """The grader of `grounding_shapes`."""

    def __init__(self, settings: GroundingShapesEnvironment) -> None:
        reward = settings.reward_kind or REWARD_KINDS[settings.ask][0]
        self._rule = Rule(ask=settings.ask, reward=reward, format_weight=settings.format_weight)
        self._frame = (float(settings.scale), float(settings.scale))

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        boxes: Any = task.row[_PLACES]
        truth = [in_shares(box, self._frame) for box in boxes]
        placed = grade(turns[-1].text, truth, self._frame, self._rule)
        return Score(
            reward=placed.reward(self._rule), accuracy=placed.accuracy, parts=placed.parts, marks=placed.marks(truth)
        )
