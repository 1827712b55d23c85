"""Questions with a single right answer: about one picture, about two, and about a scene described in words.

Since answers alternate, each scene is generated for a given answer. Distractors have shapes that are not asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

import numpy as np

from fovea_gym.environments.shapes.scenes import COLOURS, SHAPES, Colour, Shape, Thing

SceneKind: TypeAlias = Literal["counting", "colour", "shape", "existence"]
KINDS: tuple[SceneKind, ...] = ("counting", "colour", "shape", "existence")
MAX_COUNT = 4
COMPARISON_ANSWERS = ("first", "yes", "second", "no")
_MAX_CARD = 10_000


@dataclass(frozen=True, slots=True)
class Scene:
    """A question about the things in one picture."""

    question: str
    answer: str
    things: tuple[Thing, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A question about two pictures."""

    question: str
    answer: str
    pictures: tuple[tuple[Thing, ...], tuple[Thing, ...]]


def scene(kind: SceneKind, turn: int, level: int, rng: np.random.Generator) -> Scene:
    """A question with the answer of this turn, and a scene for which that answer is right."""
    num_distractors = _num_distractors(level, rng)
    if kind == "counting":
        return _counting(1 + turn % MAX_COUNT, num_distractors, rng)
    if kind == "colour":
        return _colour(COLOURS[turn % len(COLOURS)], num_distractors, rng)
    if kind == "shape":
        return _shape(SHAPES[turn % len(SHAPES)], num_distractors, rng)
    return _existence(turn % 2 == 0, num_distractors, rng)


def comparison(turn: int, level: int, rng: np.random.Generator) -> Comparison:
    """A question about which of two pictures has more of a shape, or whether both have the same number."""
    answer = COMPARISON_ANSWERS[turn % len(COMPARISON_ANSWERS)]
    shape = _pick(SHAPES, rng)
    fewer, more = sorted(rng.choice(MAX_COUNT + 1, size=2, replace=False).tolist())
    if answer == "yes":
        counts = (more, more)
    elif answer == "first" or (answer == "no" and rng.integers(2)):
        counts = (more, fewer)
    else:
        counts = (fewer, more)
    which = f"Which image has more {shape}s, the first or the second?"
    same = f"Do both images have the same number of {shape}s?"
    first, second = (_with_count(count, shape, level, rng) for count in counts)
    return Comparison(which if answer in ("first", "second") else same, answer, (first, second))


def in_words(seen: Scene, rng: np.random.Generator) -> str:
    """The question after a description of its scene: `Card 7 shows a red circle and a blue square. Is there a circle?`

    The card number makes otherwise equal scenes distinct, as noise does for pixels.
    """
    names = [f"a {thing.colour} {thing.shape}" for thing in seen.things]
    *rest, last = [names[place] for place in rng.permutation(len(names))]
    shapes = f"{', '.join(rest)} and {last}" if rest else last
    return f"Card {rng.integers(1, _MAX_CARD)} shows {shapes}. {seen.question}"


def _num_distractors(level: int, rng: np.random.Generator) -> int:
    return 0 if level == 1 else int(rng.integers(1, 3))


def _with_count(count: int, shape: Shape, level: int, rng: np.random.Generator) -> tuple[Thing, ...]:
    asked = tuple(Thing(shape=shape, colour=_pick(COLOURS, rng)) for _ in range(count))
    return asked + _things(_num_distractors(level, rng), rng, not_shape=shape)


def _counting(count: int, num_distractors: int, rng: np.random.Generator) -> Scene:
    shape = _pick(SHAPES, rng)
    asked = tuple(Thing(shape=shape, colour=_pick(COLOURS, rng)) for _ in range(count))
    distractors = _things(num_distractors, rng, not_shape=shape)
    return Scene(f"How many {shape}s are there?", str(count), asked + distractors)


def _colour(colour: Colour, num_distractors: int, rng: np.random.Generator) -> Scene:
    shape = _pick(SHAPES, rng)
    distractors = _things(num_distractors, rng, not_shape=shape)
    return Scene(f"What colour is the {shape}?", colour, (Thing(shape=shape, colour=colour), *distractors))


def _shape(shape: Shape, num_distractors: int, rng: np.random.Generator) -> Scene:
    colour = _pick(COLOURS, rng)
    distractors = _things(num_distractors, rng, not_shape=shape, not_colour=colour)
    # among several shapes it is the colour that says which one is meant
    question = f"Which shape is {colour}?" if distractors else "Which shape is shown?"
    return Scene(question, shape, (Thing(shape=shape, colour=colour), *distractors))


def _existence(exists: bool, num_distractors: int, rng: np.random.Generator) -> Scene:
    shape = _pick(SHAPES, rng)
    others = _things(num_distractors + (not exists), rng, not_shape=shape)
    asked = (Thing(shape=shape, colour=_pick(COLOURS, rng)),) if exists else ()
    return Scene(f"Is there a {shape}?", "yes" if exists else "no", asked + others)


def _things(
    n: int, rng: np.random.Generator, *, not_shape: Shape, not_colour: Colour | None = None
) -> tuple[Thing, ...]:
    shapes = [shape for shape in SHAPES if shape != not_shape]
    colours = [colour for colour in COLOURS if colour != not_colour]
    return tuple(Thing(shape=_pick(shapes, rng), colour=_pick(colours, rng)) for _ in range(n))


_Choice = TypeVar("_Choice")


def _pick(choices: Sequence[_Choice], rng: np.random.Generator) -> _Choice:
    return choices[int(rng.integers(len(choices)))]
