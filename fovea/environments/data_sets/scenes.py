"""The rendered data sets: two files of rows, each from (seed, split, index) alone, and a scene as a cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fovea.data.writing import png_cell, write_rows
from fovea.environments.shapes.scenes import Thing, draw

STREAMS = {"train": 0, "test": 1}
_TEST_SHARE = 0.1


def num_test_rows(num_rows: int) -> int:
    """The number of test rows: a tenth of the training rows, at least one."""
    return max(int(num_rows * _TEST_SHARE), 1)


def write_rendered(
    folder: Path,
    schema: Any,
    row: Callable[[int, np.random.Generator], Mapping[str, object]],
    *,
    num_rows: int,
    seed: int,
) -> list[Path]:
    """Write `num_rows` training rows and a tenth as many test rows, made by `row(index, rng)`; returns the files."""
    sizes = {"train": num_rows, "test": num_test_rows(num_rows)}
    return [
        write_rows(
            folder / f"{split}.parquet",
            schema,
            (row(index, np.random.default_rng([seed, STREAMS[split], index])) for index in range(size)),
        )
        for split, size in sizes.items()
    ]


def scene_cell(things: Sequence[Thing], side_px: int, rng: np.random.Generator) -> dict[str, object]:
    """A picture of the things, on a grid or anywhere, without noise, which PNG cannot compress."""
    canvas_YXC = draw(things, side_px, rng, free=bool(rng.integers(2)))
    return png_cell(np.clip(canvas_YXC, 0, 255).astype(np.uint8))
