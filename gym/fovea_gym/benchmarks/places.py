"""Boxes of RefCOCO (arXiv 1608.00272) and ScreenSpot (arXiv 2401.10935), in shares of the picture's sides.

Prompts and verdicts: lmms-eval's tasks `refcoco_bbox_rec_val` and `screenspot_rec_test`. For a model that was trained
on other coordinates, evaluate `environment.name=grounding` on the same pictures instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from fovea_gym.benchmarks.base import Benchmark, Published, Row
from fovea_gym.rows.images import ImageOpener
from fovea_gym.types import ImageRef

Box: TypeAlias = tuple[float, ...]
_FORMAT = (
    "Bounding box coordinates are specified in the format (top-left x, top-left y, bottom-right x, bottom-right y). "
    "All values are floating point numbers bounded between 0 and 1"
)
_NUMBER = r"\s*(-?\d+(?:\.\d+)?)"
_FOUR = rf"{_NUMBER},{_NUMBER},{_NUMBER},{_NUMBER}\s*"
_SQUARE, _ANY_BRACKET = re.compile(rf"\[{_FOUR}\]"), re.compile(rf"[\[(]{_FOUR}[\])]")
_NOTHING: Box = (0.0, 0.0, 0.0, 0.0)
_HEADERS = ImageOpener(max_image_mib=32, max_image_megapixels=64)
"""Reads sizes of pictures, within the default limits of `data`."""


class RefCoco(Benchmark):
    """The benchmark `refcoco`: one box for each expression, right if its IoU is at least 0.5."""

    name = "refcoco"
    hub = "lmms-lab/RefCOCO"
    files = ("data/val-*.parquet", "val-*.parquet")
    columns = ("image", "answer", "bbox")
    published: tuple[Published, ...] = ()

    def rows(self, row: Row) -> Sequence[Row]:
        """A row for each expression, with the box in shares of the picture."""
        box = _shares(row)
        expressions = row["answer"]
        if not isinstance(expressions, list | tuple):
            raise TypeError(f"answer is {type(expressions).__name__}, not a list of expressions")
        return [{**row, "answer": str(expression), "bbox": box} for expression in expressions]

    def question(self, row: Row) -> str:
        asked = "Please provide the bounding box coordinate of the region this sentence describes"
        return f"{_FORMAT}. {asked}: {row['answer']}"

    def answer(self, row: Row) -> str:
        return _written(row)

    def kind(self, row: Row) -> str:
        return self.name

    def is_right(self, row: Row, response: str) -> bool:
        return iou(_numbers(row["bbox"]), _first_box(response, _SQUARE)) >= 0.5


class ScreenSpot(Benchmark):
    """The benchmark `screenspot`: the box of an element; right if its centre is in the true box."""

    name = "screenspot"
    hub = "rootsautomation/ScreenSpot"
    files = ("data/test-*.parquet", "test-*.parquet")
    columns = ("image", "instruction", "bbox", "data_type", "data_source")
    published: tuple[Published, ...] = ()

    def question(self, row: Row) -> str:
        asked = "Please provide the bounding box coordinates of the region that corresponds to the command"
        return f"{_FORMAT} with two decimal places of precision (e.g., 0.15). {asked}: {row['instruction']}"

    def answer(self, row: Row) -> str:
        return _written(row)

    def kind(self, row: Row) -> str:
        source = str(row["data_source"])
        device = "mobile" if source in ("ios", "android") else "desktop" if source in ("macos", "windows") else "web"
        return f"{device} {row['data_type']}"

    def is_right(self, row: Row, response: str) -> bool:
        read = _first_box(response, _ANY_BRACKET)
        # numbers above 1 are read as thousandths, as in lmms-eval
        x0, y0, x1, y1 = [number / 1000 for number in read] if max(read) > 1 else read
        left, top, right, bottom = _numbers(row["bbox"])
        return left <= (x0 + x1) / 2 <= right and top <= (y0 + y1) / 2 <= bottom


def iou(one: Box, other: Box) -> float:
    """The IoU of two boxes by lmms-eval's formula, in which areas are negative if corners are swapped."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    shared = max(0.0, width) * max(0.0, height)
    union = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)) - shared
    return shared / union if union else 0.0


def _first_box(response: str, pattern: re.Pattern[str]) -> Box:
    found = pattern.search(response)
    return tuple(map(float, found.groups())) if found else _NOTHING


def _numbers(cell: object) -> Box:
    """The four numbers of a cell; ValueError for anything else."""
    if not isinstance(cell, list | tuple) or len(cell) != 4:
        raise ValueError("bbox is not a box of four numbers")
    return tuple(map(float, cell))


def _written(row: Row) -> str:
    return f"[{', '.join(f'{number:.4f}' for number in _numbers(row['bbox']))}]"


def _shares(row: Row) -> Box:
    """The box of a row, in COCO's pixels (left, top, width, height), as corners in shares of the picture's sides."""
    cell = row["image"]
    if not isinstance(cell, Mapping) or not isinstance(cell.get("bytes"), bytes):
        raise TypeError("image is not a picture in the file")
    side_x, side_y = _HEADERS.size(ImageRef(source=cell["bytes"]))
    left, top, width, height = _numbers(row["bbox"])
    return left / side_x, top / side_y, (left + width) / side_x, (top + height) / side_y
