"""Rendered scenes with questions of several types, which take turns, for the environment `vqa`.

There are two layouts. The first has five types; half of its rows on a count or an attribute also have the answers of
several annotators (`environment.answers_key`). The second has the three types and the columns of the published workflow
vlm-rl-training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from fovea_gym.environments.dataset_prompts import IMAGE_MARK
from fovea_gym.environments.shapes.questions import Scene
from fovea_gym.environments.shapes.scenes import COLOURS, SHAPES, Colour, Shape, Thing
from fovea_gym.graders.vqa_words import LETTERS, listed_options
from fovea_gym.rows.writing import IMAGE_TYPE
from fovea_tools.data_sets.scenes import scene_cell, write_rendered

QuestionType: TypeAlias = Literal["counting", "attribute", "existence", "yes_no", "multiple_choice"]
MAX_COUNT = 5
NUM_OPTIONS = 4
NUM_ANNOTATORS = 10
_MAX_DISSENTERS = 3
_THINGS = tuple(Thing(shape=shape, colour=colour) for shape in SHAPES for colour in COLOURS)
_OTHER_WORDS: Mapping[str, tuple[str, ...]] = {
    "red": ("crimson", "scarlet"),
    "green": ("lime", "olive"),
    "blue": ("navy", "purple"),
    "yellow": ("gold", "orange"),
    "circle": ("ball", "disc"),
    "square": ("box", "rectangle"),
    "triangle": ("cone", "arrow"),
}


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The things that a question is about: those of a shape, of a colour, or of both."""

    shape: Shape | None
    colour: Colour | None

    def fits(self, thing: Thing) -> bool:
        return self.shape in (None, thing.shape) and self.colour in (None, thing.colour)

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.colour, self.shape or "thing")))


def ask(kind: QuestionType, turn: int, rng: np.random.Generator) -> Scene:
    """A scene with a question of this type; `turn` decides the answer."""
    return _MAKERS[kind](turn, rng)


def annotators(answer: str, rng: np.random.Generator) -> list[str]:
    """The answers of ten people: at least seven give the true answer, the others a similar one."""
    near = _OTHER_WORDS.get(answer) or (str(int(answer) + 1), str(max(int(answer) - 1, 0)))
    num_dissenters = int(rng.integers(_MAX_DISSENTERS + 1))
    said = [answer] * (NUM_ANNOTATORS - num_dissenters) + [_pick(near, rng) for _ in range(num_dissenters)]
    return [said[place] for place in rng.permutation(NUM_ANNOTATORS)]


def _counting(turn: int, rng: np.random.Generator) -> Scene:
    count, wanted = turn % (MAX_COUNT + 1), _wanted(rng)
    asked, others = _draw(wanted.fits, count, rng), _draw(_not(wanted), int(rng.integers(1, 4)), rng)
    return Scene(f"How many {wanted.name}s are there?", str(count), asked + others)


def _attribute(turn: int, rng: np.random.Generator) -> Scene:
    num_others = int(rng.integers(1, 4))
    turn, asks_shape = divmod(turn, 2)
    if asks_shape:
        thing = Thing(shape=SHAPES[turn % len(SHAPES)], colour=_pick(COLOURS, rng))
        others = _draw(lambda other: other.colour != thing.colour, num_others, rng)
        return Scene(f"What shape is the {thing.colour} thing?", thing.shape, (thing, *others))
    return _colour(COLOURS[turn % len(COLOURS)], num_others, rng)


def _colour(colour: Colour, num_others: int, rng: np.random.Generator) -> Scene:
    shape = _pick(SHAPES, rng)
    others = _draw(lambda other: other.shape != shape, num_others, rng)
    return Scene(f"What colour is the {shape}?", colour, (Thing(shape=shape, colour=colour), *others))


def _existence(turn: int, rng: np.random.Generator) -> Scene:
    """A question about whether a thing exists; scenes have the same number of things for yes and for no."""
    exists, wanted, num_things = turn % 2 == 0, _wanted(rng), int(rng.integers(1, 5))
    asked, others = _draw(wanted.fits, int(exists), rng), _draw(_not(wanted), num_things - exists, rng)
    return Scene(f"Is there a {wanted.name}?", "yes" if exists else "no", asked + others)


def _yes_no(turn: int, rng: np.random.Generator) -> Scene:
    turn, form = divmod(turn, 2)
    return (_same_colour if form else _more)(turn % 2 == 0, rng)


def _more(is_true: bool, rng: np.random.Generator) -> Scene:
    one, other = (SHAPES[place] for place in rng.permutation(len(SHAPES))[:2])
    fewer, more = sorted(rng.choice(MAX_COUNT, size=2, replace=False).tolist())
    counts = (more, fewer) if is_true else (fewer, more)
    things = [
        thing
        for shape, count in zip((one, other), counts, strict=True)
        for thing in _draw(_Wanted(shape, None).fits, count, rng)
    ]
    return Scene(f"Are there more {one}s than {other}s?", "yes" if is_true else "no", tuple(things))


def _same_colour(is_true: bool, rng: np.random.Generator) -> Scene:
    wanted, num_things = _Wanted(None, _pick(COLOURS, rng)), int(rng.integers(2, 5))
    num_others = 0 if is_true else int(rng.integers(1, num_things))
    things = _draw(wanted.fits, num_things - num_others, rng) + _draw(_not(wanted), num_others, rng)
    return Scene(f"Are all the things {wanted.colour}?", "yes" if is_true else "no", things)


def _multiple_choice(turn: int, rng: np.random.Generator) -> Scene:
    """A question with its options in the text, so that the same settings read rows of all types."""
    turn, place = divmod(turn, NUM_OPTIONS)
    question, right, wrong, things = (_which_colour if turn % 2 else _which_thing)(rng)
    options = [*wrong[:place], right, *wrong[place:]]
    text = f"{question}\n{listed_options(options)}\nAnswer with the letter."
    return Scene(text, LETTERS[place], things)


def _which_colour(rng: np.random.Generator) -> tuple[str, str, list[str], tuple[Thing, ...]]:
    seen = _colour(_pick(COLOURS, rng), int(rng.integers(1, 4)), rng)
    others = [colour for colour in COLOURS if colour != seen.answer]
    return seen.question, seen.answer, [others[place] for place in rng.permutation(len(others))], seen.things


def _which_thing(rng: np.random.Generator) -> tuple[str, str, list[str], tuple[Thing, ...]]:
    order = [_THINGS[place] for place in rng.permutation(len(_THINGS))]
    wrong, seen = order[: NUM_OPTIONS - 1], order[NUM_OPTIONS - 1 :][: int(rng.integers(1, 5))]
    right, *others = (f"a {thing.colour} {thing.shape}" for thing in (seen[0], *wrong))
    return "Which of these is in the image?", right, others, tuple(seen)


_MAKERS: Mapping[QuestionType, Callable[[int, np.random.Generator], Scene]] = {
    "counting": _counting,
    "attribute": _attribute,
    "existence": _existence,
    "yes_no": _yes_no,
    "multiple_choice": _multiple_choice,
}
QUESTION_TYPES = tuple(_MAKERS)


def _wanted(rng: np.random.Generator) -> _Wanted:
    shape, colour = _pick(SHAPES, rng), _pick(COLOURS, rng)
    return _pick((_Wanted(shape, None), _Wanted(None, colour), _Wanted(shape, colour)), rng)


def _not(wanted: _Wanted) -> Callable[[Thing], bool]:
    return lambda thing: not wanted.fits(thing)


def _draw(fits: Callable[[Thing], bool], n: int, rng: np.random.Generator) -> tuple[Thing, ...]:
    things = [thing for thing in _THINGS if fits(thing)]
    return tuple(_pick(things, rng) for _ in range(n))


_Choice = TypeVar("_Choice")


def _pick(choices: Sequence[_Choice], rng: np.random.Generator) -> _Choice:
    return choices[int(rng.integers(len(choices)))]


_WITH_ANNOTATORS = ("counting", "attribute")
_QUESTION = (("images", pa.list_(IMAGE_TYPE)), ("problem", pa.string()), ("answer", pa.string()))
_SCHEMA = pa.schema([*_QUESTION, ("answers", pa.list_(pa.string())), ("question_type", pa.string())])
PUBLISHED_TYPES: tuple[QuestionType, ...] = ("existence", "attribute", "counting")
_PUBLISHED_SCHEMA = pa.schema(
    [("image", IMAGE_TYPE), ("question", pa.string()), ("answer", pa.string()), ("type", pa.string())]
)


def write_vqa(folder: Path, *, num_rows: int, seed: int, image_side_px: int) -> list[Path]:
    """Write `train.parquet` and `test.parquet`, equal for equal arguments, and return them."""
    return write_rendered(folder, _SCHEMA, partial(_row, image_side_px), num_rows=num_rows, seed=seed)


def write_visual_qa(folder: Path, *, num_rows: int, seed: int, image_side_px: int) -> list[Path]:
    """Write the same two files, with the types and columns of the published workflow, and return them."""
    row = partial(_published_row, image_side_px)
    return write_rendered(folder, _PUBLISHED_SCHEMA, row, num_rows=num_rows, seed=seed)


def _published_row(side_px: int, index: int, rng: np.random.Generator) -> dict[str, object]:
    kind, scene = _asked(PUBLISHED_TYPES, index, rng)
    image = scene_cell(scene.things, side_px, rng)
    return {"image": image, "question": scene.question, "answer": scene.answer, "type": kind}


def _asked(kinds: Sequence[QuestionType], index: int, rng: np.random.Generator) -> tuple[QuestionType, Scene]:
    """The type of a row's question, and its scene."""
    turn, place = divmod(index, len(kinds))
    return kinds[place], ask(kinds[place], turn, rng)


def _row(side_px: int, index: int, rng: np.random.Generator) -> dict[str, object]:
    kind, scene = _asked(QUESTION_TYPES, index, rng)
    several = kind in _WITH_ANNOTATORS and bool(rng.integers(2))
    return {
        "images": [scene_cell(scene.things, side_px, rng)],
        "problem": f"{IMAGE_MARK}{scene.question}",
        "answer": scene.answer,
        "answers": annotators(scene.answer, rng) if several else None,
        "question_type": kind,
    }
