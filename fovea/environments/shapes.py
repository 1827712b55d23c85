"""Questions about rendered scenes: how many, what colour, which shape, is there one.

Scenes are drawn when asked for, from (seed, split, index) alone. The hash of its pixels says to which split
a scene may belong, so no image is in two of them; dev and test do not depend on the seed: every run has the
same. The kind of row i is `KINDS[i % 4]`, and the answers of a kind take turns: every prefix is balanced.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from fovea.config import ShapesEnvironment
from fovea.data.order import LazyTasks
from fovea.environments.answers import last_boxed
from fovea.environments.base import Split
from fovea.environments.grading import Grade, shown
from fovea.environments.scenes import COLOURS, SHAPES, Colour, Shape, Thing, draw, with_noise
from fovea.types import ImageRef, Message, Score, Task, Turn

Kind: TypeAlias = Literal["counting", "colour", "shape", "existence"]
KINDS: tuple[Kind, ...] = ("counting", "colour", "shape", "existence")
MAX_COUNT = 4

_STREAMS: dict[Split, int] = {"train": 0, "dev": 1, "test": 2}
_HELD_OUT_SEED = 2024
_BOX = re.compile(r"\\boxed\{[^{}]*\}")


@dataclass(frozen=True, slots=True)
class _Scene:
    question: str
    answer: str
    things: tuple[Thing, ...]


class Shapes:
    """The environment `shapes`; see `config.ShapesEnvironment`."""

    def __init__(self, config: ShapesEnvironment, seed: int) -> None:
        self._config = config
        self._seed = seed

    def tasks(self, split: Split) -> Sequence[Task]:
        sizes = {
            "train": self._config.train_size,
            "dev": self._config.dev_size,
            "test": self._config.test_size,
        }
        return LazyTasks(lambda index: self._task(split, index), range(sizes[split]), kind_of=_kind)

    def prompt(self, task: Task) -> Sequence[Message]:
        return (Message(role="user", parts=(*task.images, task.question)),)

    def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        graded = grade(turns[-1].text, task.answer)
        return Score(reward=graded.score, accuracy=graded.score, parts=graded.parts)

    def target(self, task: Task) -> str:
        return _boxed(task.answer)

    def _task(self, split: Split, index: int) -> Task:
        seed = self._seed if split == "train" else _HELD_OUT_SEED
        rng = np.random.default_rng([seed, _STREAMS[split], index])
        level, side_px = self._config.level, self._config.image_side_px
        scene = _scene(_kind(index), index // len(KINDS), level, rng)
        canvas_YXC = draw(scene.things, side_px, rng, free=level == 3)
        pixels_YXC = with_noise(canvas_YXC, rng)
        while _split_of(pixels_YXC) != split:
            pixels_YXC = with_noise(canvas_YXC, rng)
        task_id = f"{split}/{index}"
        image = ImageRef(source=pixels_YXC, where=f"shapes {task_id}")
        return Task(id=task_id, question=scene.question, answer=scene.answer, images=(image,), kind=_kind(index))


def grade(prediction: str, truth: str) -> Grade:
    """Right is the boxed answer and nothing beside it: whatever else earned reward would become the policy's format."""
    text, boxed = prediction.strip(), last_boxed(prediction)
    is_right = text == _boxed(truth)
    parts = {"answer": float(boxed == truth), "format": float(_BOX.fullmatch(text) is not None)}
    reason = f"{shown(text)} {'is' if is_right else 'is not'} {shown(_boxed(truth))}"
    return Grade(score=float(is_right), parts=parts, reason=reason)


def _boxed(answer: str) -> str:
    return rf"\boxed{{{answer}}}"


def _digest(pixels_YXC: NDArray[np.uint8]) -> bytes:
    return hashlib.md5(pixels_YXC.tobytes(), usedforsecurity=False).digest()


def _split_of(pixels_YXC: NDArray[np.uint8]) -> Split:
    bucket = _digest(pixels_YXC)[0] % 10
    return "test" if bucket == 0 else "dev" if bucket == 1 else "train"


def _kind(index: int) -> Kind:
    return KINDS[index % len(KINDS)]


def _scene(kind: Kind, turn: int, level: int, rng: np.random.Generator) -> _Scene:
    """The question whose answer's turn it is, and what is seen; distractors are of shapes not asked for."""
    num_distractors = 0 if level == 1 else int(rng.integers(1, 3))
    if kind == "counting":
        return _counting(1 + turn % MAX_COUNT, num_distractors, rng)
    if kind == "colour":
        return _colour(COLOURS[turn % len(COLOURS)], num_distractors, rng)
    if kind == "shape":
        return _shape(SHAPES[turn % len(SHAPES)], num_distractors, rng)
    return _existence(turn % 2 == 0, num_distractors, rng)


def _counting(count: int, num_distractors: int, rng: np.random.Generator) -> _Scene:
    shape = _pick(SHAPES, rng)
    asked = tuple(Thing(shape=shape, colour=_pick(COLOURS, rng)) for _ in range(count))
    distractors = _things(num_distractors, rng, not_shape=shape)
    return _Scene(f"How many {shape}s are there?", str(count), asked + distractors)


def _colour(colour: Colour, num_distractors: int, rng: np.random.Generator) -> _Scene:
    shape = _pick(SHAPES, rng)
    distractors = _things(num_distractors, rng, not_shape=shape)
    return _Scene(f"What colour is the {shape}?", colour, (Thing(shape=shape, colour=colour), *distractors))


def _shape(shape: Shape, num_distractors: int, rng: np.random.Generator) -> _Scene:
    colour = _pick(COLOURS, rng)
    distractors = _things(num_distractors, rng, not_shape=shape, not_colour=colour)
    # among several shapes it is the colour that says which one is meant
    question = f"Which shape is {colour}?" if distractors else "Which shape is shown?"
    return _Scene(question, shape, (Thing(shape=shape, colour=colour), *distractors))


def _existence(exists: bool, num_distractors: int, rng: np.random.Generator) -> _Scene:
    shape = _pick(SHAPES, rng)
    others = _things(num_distractors + (not exists), rng, not_shape=shape)
    asked = (Thing(shape=shape, colour=_pick(COLOURS, rng)),) if exists else ()
    return _Scene(f"Is there a {shape}?", "yes" if exists else "no", asked + others)


def _things(
    n: int, rng: np.random.Generator, *, not_shape: Shape, not_colour: Colour | None = None
) -> tuple[Thing, ...]:
    shapes = [shape for shape in SHAPES if shape != not_shape]
    colours = [colour for colour in COLOURS if colour != not_colour]
    return tuple(Thing(shape=_pick(shapes, rng), colour=_pick(colours, rng)) for _ in range(n))


_Choice = TypeVar("_Choice")


def _pick(choices: Sequence[_Choice], rng: np.random.Generator) -> _Choice:
    return choices[int(rng.integers(len(choices)))]
