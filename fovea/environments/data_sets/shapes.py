"""The rows of the environment `shapes` as files: for inspection, or for use elsewhere. A run renders them itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from fovea.config.run import ShapesEnvironment
from fovea.data.order import levels_of
from fovea.data.writing import IMAGE_TYPE, png_cell, write_rows
from fovea.environments.base import Split
from fovea.environments.data_sets.scenes import num_test_rows
from fovea.environments.dataset_prompts import IMAGE_MARK
from fovea.environments.shapes.environment import Shapes
from fovea.errors import ConfigError
from fovea.types import ImageRef

_SCHEMA = pa.schema(
    [
        ("prompt", pa.string()),
        ("images", pa.list_(IMAGE_TYPE)),
        ("answer", pa.string()),
        ("kind", pa.string()),
        ("level", pa.int32()),
    ]
)


def write_shapes(
    folder: Path,
    *,
    num_rows: int,
    seed: int,
    image_side_px: int,
    levels: Sequence[int] = (1,),
    comparison_share: float = 0.0,
    text_share: float = 0.0,
) -> list[Path]:
    """Write `train.parquet` and `test.parquet`: the first rows of a run with this seed and these settings."""
    if comparison_share + text_share > 1:
        raise ConfigError(
            f"--comparison-share={comparison_share:g} and --text-share={text_share:g} are more than all rows "
            "together; lower one of them"
        )
    settings = ShapesEnvironment(
        level=tuple(dict.fromkeys(levels)),
        comparison_share=comparison_share,
        text_share=text_share,
        train_size=num_rows,
        test_size=num_test_rows(num_rows),
        image_side_px=image_side_px,
    )
    environment = Shapes(settings, seed)
    splits: tuple[Split, ...] = ("train", "test")
    return [write_rows(folder / f"{split}.parquet", _SCHEMA, _rows(environment, split)) for split in splits]


def _rows(environment: Shapes, split: Split) -> Iterator[dict[str, object]]:
    tasks = environment.tasks(split)
    for task, level in zip(tasks, levels_of(tasks) or (), strict=True):
        yield {
            "prompt": IMAGE_MARK * len(task.images) + task.question,
            "images": [_cell(ref) for ref in task.images],
            "answer": task.answer,
            "kind": task.kind,
            "level": int(level),
        }


def _cell(ref: ImageRef) -> dict[str, object]:
    assert isinstance(ref.source, np.ndarray), ref.where
    return png_cell(ref.source)
