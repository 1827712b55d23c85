"""Rows drawn by the tests themselves: coloured squares, written as the Parquet files of a data set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from gym_tests.images import png

COLOURS = {"red": (250, 10, 10), "green": (10, 200, 10), "blue": (10, 10, 250)}


def square(colour: str, side_px: int = 32) -> dict[str, object]:
    return {"bytes": png(COLOURS[colour], side_px), "path": None}


def row(problem: str, answer: object, colour: str = "red", **cells: object) -> dict[str, object]:
    return {"images": [square(colour)], "problem": f"<image>{problem}", "answer": answer, **cells}


def files(folder: Path, rows: Sequence[dict[str, object]], **settings: object) -> dict[str, object]:
    """The settings of an environment with these rows for training and test."""
    path = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return {"train_files": (str(path),), "test_files": (str(path),), **settings}
