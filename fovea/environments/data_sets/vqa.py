"""Rendered scenes with questions of several types, for the environment `vqa`; the types take turns.

Two layouts: five types, where half of the rows on a count or an attribute have the answers of several annotators as
well (`environment.answers_key`); and the three types and the columns of the published workflow vlm-rl-training.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from fovea.data.writing import IMAGE_TYPE
from fovea.environments.data_sets.scenes import scene_cell, write_rendered
from fovea.environments.data_sets.vqa_questions import QUESTION_TYPES, QuestionType, annotators, ask
from fovea.environments.dataset_prompts import IMAGE_MARK
from fovea.environments.shapes.questions import Scene

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
PUBLISHED_TYPES: tuple[QuestionType, ...] = ("existence", "attribute", "counting")
_PUBLISHED_SCHEMA = pa.schema(
    [("image", IMAGE_TYPE), ("question", pa.string()), ("answer", pa.string()), ("type", pa.string())]
)


def write_vqa(folder: Path, *, num_rows: int, seed: int, image_side_px: int) -> list[Path]:
    """Write `train.parquet` and `test.parquet`, equal for equal arguments, and return them."""
    return write_rendered(folder, _SCHEMA, partial(_row, image_side_px), num_rows=num_rows, seed=seed)


def write_visual_qa(folder: Path, *, num_rows: int, seed: int, image_side_px: int) -> list[Path]:
    """Write the same two files with the three types and the columns of the published workflow, and return them."""
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
