"""Rendered scenes with questions of five types, for the environment `vqa`: row i is of type `QUESTION_TYPES[i % 5]`.

Half of the rows on a count or an attribute have the answers of several annotators as well (`environment.answers_key`).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from fovea.data.writing import IMAGE_TYPE
from fovea.environments.data_sets.scenes import scene_cell, write_rendered
from fovea.environments.data_sets.vqa_questions import QUESTION_TYPES, annotators, ask
from fovea.environments.dataset_prompts import IMAGE_MARK

_WITH_ANNOTATORS = ("counting", "attribute")
_SCHEMA = pa.schema(
    [
        ("images", pa.list_(IMAGE_TYPE)),
        ("problem", pa.string()),
        ("answer", pa.string()),
        ("answers", pa.list_(pa.string())),
        ("question_type", pa.string()),
    ]
)


def write_vqa(folder: Path, *, num_rows: int, seed: int, image_side_px: int) -> list[Path]:
    """Write `train.parquet` and `test.parquet`, equal for equal arguments, and return them."""
    return write_rendered(folder, _SCHEMA, partial(_row, image_side_px), num_rows=num_rows, seed=seed)


def _row(side_px: int, index: int, rng: np.random.Generator) -> dict[str, object]:
    turn, place = divmod(index, len(QUESTION_TYPES))
    kind = QUESTION_TYPES[place]
    scene = ask(kind, turn, rng)
    several = kind in _WITH_ANNOTATORS and bool(rng.integers(2))
    return {
        "images": [scene_cell(scene.things, side_px, rng)],
        "problem": f"{IMAGE_MARK}{scene.question}",
        "answer": scene.answer,
        "answers": annotators(scene.answer, rng) if several else None,
        "question_type": kind,
    }
