"""Writers of rendered data sets, whose rows depend only on seed, split and index, and cells with scenes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fovea_gym.environments.dataset_prompts import IMAGE_MARK
from fovea_gym.environments.shapes.scenes import COLOURS, SHAPES, Thing, draw
from fovea_gym.rows.writing import IMAGE_TYPE, png_cell, write_rows

SHARES = {"train": 1.0, "validation": 1 / 20, "test": 1 / 10}
"""Number of rows of each file relative to the training rows; each file has at least one row."""


def write_rendered(
    folder: Path,
    schema: Any,
    row: Callable[[int, np.random.Generator], Mapping[str, object]],
    *,
    num_rows: int,
    seed: int,
) -> list[Path]:
    """Write `num_rows` training rows and a tenth as many test rows, each from `row(index, rng)`; return the files."""

    def rows(stream: int, size: int) -> Iterator[Mapping[str, object]]:
        return (row(index, np.random.default_rng([seed, stream, index])) for index in range(size))

    sizes = {"train": num_rows, "test": max(int(num_rows * SHARES["test"]), 1)}
    return [
        write_rows(folder / f"{split}.parquet", schema, rows(stream, size))
        for stream, (split, size) in enumerate(sizes.items())
    ]


def write_sampled(
    folder: Path,
    schema: Any,
    draw: Callable[[str, int, np.random.Generator], tuple[bytes, Mapping[str, object]]],
    *,
    num_rows: int,
    seed: int,
) -> Iterator[Path]:
    """Write train, validation (a twentieth) and test (a tenth) files, equal for equal arguments; yield each.

    `draw` returns the bytes of a drawing and its row, for a split and an index; a drawing that another row has is drawn
    again.
    """
    drawn: set[bytes] = set()

    def rows(split: str, size: int, rng: np.random.Generator) -> Iterator[Mapping[str, object]]:
        index = 0
        while index < size:
            drawing, row = draw(split, index, rng)
            if drawing not in drawn:
                drawn.add(drawing)
                index += 1
                yield row

    for stream, (split, share) in enumerate(SHARES.items()):
        made = rows(split, max(int(num_rows * share), 1), np.random.default_rng([seed, stream]))
        yield write_rows(folder / f"{split}.parquet", schema, made)


def scene_cell(things: Sequence[Thing], side_px: int, rng: np.random.Generator) -> dict[str, object]:
    """A picture of the things, on a grid or at random places, without noise, since PNG cannot compress noise."""
    canvas_YXC = draw(things, side_px, rng, free=bool(rng.integers(2)))
    return png_cell(np.clip(canvas_YXC, 0, 255).astype(np.uint8))


_PICTURES = ("images", pa.list_(IMAGE_TYPE))
MAX_THINGS = 4
QUESTION = "Describe the image in one sentence."
FORMS = (
    "The image shows {things}.",
    "There {verb} {things}.",
    "A picture of {things} on a dark background.",
    "On a dark background I see {things}.",
    "What can be seen here is {things}.",
)
"""Sentence patterns of captions; row i uses the first 1 + i % 5 of them."""
_NUMBERS = ("no", "a", "two", "three", "four")
_CAPTIONS_SCHEMA = pa.schema([_PICTURES, ("problem", pa.string()), ("answer", pa.list_(pa.string()))])


def write_captions(folder: Path, *, num_rows: int, seed: int, image_side_px: int) -> list[Path]:
    """Write `train.parquet` and `test.parquet`, equal for equal arguments, and return them."""
    return write_rendered(folder, _CAPTIONS_SCHEMA, partial(_row, image_side_px), num_rows=num_rows, seed=seed)


def captions(things: Sequence[Thing], num_captions: int, rng: np.random.Generator) -> list[str]:
    """Several captions of the same things."""
    counts = sorted(Counter(things).items(), key=lambda x: (SHAPES.index(x[0].shape), COLOURS.index(x[0].colour)))
    orders = [range(len(counts)), *(rng.permutation(len(counts)) for _ in range(num_captions - 1))]
    return [
        _caption(form, [counts[place] for place in order])
        for form, order in zip(FORMS[:num_captions], orders, strict=True)
    ]


def _row(side_px: int, index: int, rng: np.random.Generator) -> dict[str, object]:
    # few kinds of things, so that some occur twice
    kinds = [_thing(rng) for _ in range(2 + index % 2)]
    things = [kinds[int(rng.integers(len(kinds)))] for _ in range(rng.integers(1, MAX_THINGS + 1))]
    return {
        "images": [scene_cell(things, side_px, rng)],
        "problem": f"{IMAGE_MARK}{QUESTION}",
        "answer": captions(things, 1 + index % len(FORMS), rng),
    }


def _thing(rng: np.random.Generator) -> Thing:
    return Thing(shape=SHAPES[rng.integers(len(SHAPES))], colour=COLOURS[rng.integers(len(COLOURS))])


def _caption(form: str, counts: Sequence[tuple[Thing, int]]) -> str:
    *rest, last = [_counted(thing, count) for thing, count in counts]
    things = f"{', '.join(rest)} and {last}" if rest else last
    return form.format(things=things, verb="is" if counts[0][1] == 1 else "are")


def _counted(thing: Thing, count: int) -> str:
    return f"{_NUMBERS[count]} {thing.colour} {thing.shape}{'s' if count > 1 else ''}"
