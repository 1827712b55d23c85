"""Scenes of `shapes` in episodes of two turns: the model may look at an enlarged quarter before it answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fovea_gym.environments.access import Access
from fovea_gym.environments.base import Environment, Split
from fovea_gym.environments.shapes.environment import Shapes, ShapesGrader
from fovea_gym.settings.environments import ShapesEnvironment
from fovea_gym.types import AnswerEnd, ImageRef, Message, Task, Turn

_CROP = re.compile(r"\\crop\{([1-4])\}")
_HOW = r"Answer in a box, or see a quarter of the picture with \crop{1} to \crop{4}."


class ShapesZoomEnvironment(ShapesEnvironment):
    """Rendered scenes: the model may look at an enlarged quarter, in a second turn, before it answers."""

    name: Literal["shapes_zoom"] = "shapes_zoom"  # type: ignore[assignment]

    def make(self, access: Access, seed: int) -> ShapesZoom:
        return ShapesZoom(self, seed)


class ShapesZoom(Environment):
    """The environment `shapes_zoom`: the rows of `shapes`, each with the choice to look closer once."""

    answer_end = AnswerEnd()
    graders = (ShapesGrader(),)
    max_turns = 2

    def __init__(self, config: ShapesZoomEnvironment, seed: int) -> None:
        self._shapes = Shapes(config, seed)

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._shapes.tasks(split)

    def prompt(self, task: Task) -> Sequence[Message]:
        return (Message(role="user", parts=(*task.images, f"{task.question} {_HOW}")),)

    def reply(self, task: Task, turns: Sequence[Turn]) -> Sequence[Message] | None:
        """The quarter that the model asks for, enlarged to the size of the picture; an answer ends the episode."""
        asked = _CROP.fullmatch(turns[-1].text.strip())
        if asked is None or not task.images:
            return None
        quarter_YXC = _quarters(_pixels(task))[int(asked[1]) - 1]
        picture = ImageRef(source=quarter_YXC.repeat(2, 0).repeat(2, 1), where=f"{task.id}, quarter {asked[1]}")
        return (Message(role="user", parts=(picture, task.question)),)

    def target(self, task: Task) -> str:
        return self._shapes.target(task)

    def demonstration(self, task: Task) -> Sequence[str]:
        """Look at the quarter with the most contrast, then answer."""
        if not task.images:
            return (self.target(task),)
        contrasts = [float(quarter_YXC.std()) for quarter_YXC in _quarters(_pixels(task))]
        return (rf"\crop{{{1 + int(np.argmax(contrasts))}}}", self.target(task))


def _pixels(task: Task) -> NDArray[np.uint8]:
    source = task.images[0].source
    assert isinstance(source, np.ndarray), "scenes are drawn, not read"
    return source


def _quarters(pixels_YXC: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    middle = len(pixels_YXC) // 2
    halves = (slice(0, middle), slice(middle, 2 * middle))
    return [pixels_YXC[rows, columns] for rows in halves for columns in halves]
