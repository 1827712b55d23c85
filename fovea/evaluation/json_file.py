"""A comparison as JSON: the figures, and every answer to every row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fovea.evaluation.answer import SampledAnswer
from fovea.evaluation.comparison import Comparison, Figures, Reading, Row
from fovea.utils.files import json_number, write_atomically


def write_json(
    path: Path,
    comparison: Comparison,
    figures: Sequence[Figures],
    about: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> None:
    """`about` says which rows; accuracies are in 0..1, null where there is none."""
    content = {
        **about,
        "targets": [asdict(each) for each in figures],
        "skipped": {reading.target: _skipped(reading) for reading in comparison.readings},
        "rows": [_row(row, comparison.readings) for row in comparison.rows],
        "settings": settings,
    }
    # a data set's text may hold half a surrogate pair: ASCII can write that
    write_atomically(path, (json.dumps(_finite(content), indent=1, allow_nan=False) + "\n").encode("ascii"))


def _row(row: Row, readings: Sequence[Reading]) -> dict[str, Any]:
    return asdict(row) | {"answers": {reading.target: _answers(reading, row.id) for reading in readings}}


def _answers(reading: Reading, row_id: str) -> dict[str, Any]:
    answers: dict[str, Any] = {"greedy": _answer(reading.greedy[row_id].answers[0])}
    if row_id in reading.samples:
        answers["samples"] = list(map(_answer, reading.samples[row_id].answers))
    for name, answered in (("shuffled_images", reading.shuffled), ("blank_images", reading.blank)):
        if row_id in answered:
            answers[name] = _answer(answered[row_id].answers[0])
    return answers


def _answer(answer: SampledAnswer) -> dict[str, Any]:
    return {
        "prediction": answer.text,
        "accuracy": answer.accuracy,
        "reward": answer.reward,
        "parts": dict(answer.parts),
        "image_parts": list(map(dict, answer.image_parts)),
        "finish": answer.finish,
    }


def _skipped(reading: Reading) -> list[dict[str, Any]]:
    return [{"index": index, "reason": reason} for index, reason in sorted(reading.skipped.items())]


def _finite(value: Any) -> Any:
    """The tree with null for what JSON cannot hold, and texts for keys."""
    if isinstance(value, float):
        return json_number(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
