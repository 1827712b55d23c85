"""Rendered scenes with one to five captions each, for the environment `caption`: `answer` is the list of them.

The first caption names the things in a fixed order; the others change order and words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from fovea.data.writing import IMAGE_TYPE
from fovea.environments.data_sets.scenes import scene_cell, write_rendered
from fovea.environments.dataset_prompts import IMAGE_MARK
from fovea.environments.shapes.scenes import COLOURS, SHAPES, Thing

MAX_THINGS = 4
QUESTION = "Describe the image in one sentence."
FORMS = (
    "The image shows {things}.",
    "There {verb} {things}.",
    "A picture of {things} on a dark background.",
    "On a dark background I see {things}.",
    "What can be seen here is {things}.",
)
"""The forms of a caption; row i has the first 1 + i % 5 of them."""
_NUMBERS = ("no", "a", "two", "three", "four")
_SCHEMA = pa.schema(
    [("images", pa.list_(IMAGE_TYPE)), ("problem", pa.string()), ("answer", pa.list_(pa.string()))],
)


def write_captions(folder: Path, *, num_rows: int, seed: int, image_side_px: int) -> list[Path]:
    """Write `train.parquet` and `test.parquet`, equal for equal arguments, and return them."""
    return write_rendered(folder, _SCHEMA, partial(_row, image_side_px), num_rows=num_rows, seed=seed)


def captions(things: Sequence[Thing], num_captions: int, rng: np.random.Generator) -> list[str]:
    """Several captions of the same things."""
    counts = sorted(Counter(things).items(), key=lambda pair: _place(pair[0]))
    orders = [range(len(counts)), *(rng.permutation(len(counts)) for _ in range(num_captions - 1))]
    return [
        _caption(form, [counts[place] for place in order])
        for form, order in zip(FORMS[:num_captions], orders, strict=True)
    ]


def _row(side_px: int, index: int, rng: np.random.Generator) -> dict[str, object]:
    # a few kinds of things, so that some are seen twice
    kinds = [_thing(rng) for _ in range(2 + index % 2)]
    things = [kinds[int(rng.integers(len(kinds)))] for _ in range(rng.integers(1, MAX_THINGS + 1))]
    return {
        "images": [scene_cell(things, side_px, rng)],
        "problem": f"{IMAGE_MARK}{QUESTION}",
        "answer": captions(things, 1 + index % len(FORMS), rng),
    }


def _thing(rng: np.random.Generator) -> Thing:
    return Thing(shape=SHAPES[rng.integers(len(SHAPES))], colour=COLOURS[rng.integers(len(COLOURS))])


def _place(thing: Thing) -> tuple[int, int]:
    return SHAPES.index(thing.shape), COLOURS.index(thing.colour)


def _caption(form: str, counts: Sequence[tuple[Thing, int]]) -> str:
    *rest, last = [_counted(thing, count) for thing, count in counts]
    things = f"{', '.join(rest)} and {last}" if rest else last
    return form.format(things=things, verb="is" if counts[0][1] == 1 else "are")


def _counted(thing: Thing, count: int) -> str:
    return f"{_NUMBERS[count]} {thing.colour} {thing.shape}{'s' if count > 1 else ''}"
