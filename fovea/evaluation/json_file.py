"""The JSON file of `fovea eval --json`: metrics of every target, and every answer to every row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fovea.evaluation.answer import SampledAnswer, turns_to_json
from fovea.evaluation.comparison import EvalResults, EvalRow, TargetAnswers, TargetMetrics
from fovea.utils.files import json_number, write_atomically


def write_json(
    path: Path,
    results: EvalResults,
    metrics: Sequence[TargetMetrics],
    about: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> None:
    """Write results and metrics to `path`; `about` says which rows. Accuracies are in 0..1, null where undefined."""
    content = {
        **about,
        "targets": [asdict(each) for each in metrics],
        "banned_tokens": {target.name: asdict(target.banned) for target in results.targets if target.banned},
        "skipped": {target.name: _skipped(target) for target in results.targets},
        "unscored": {target.name: list(target.unscored) for target in results.targets},
        "rows": [_row(row, results.targets) for row in results.rows],
        "settings": settings,
    }
    # ASCII, because text of a data set may hold lone surrogates, which UTF-8 cannot encode and an escape can
    write_atomically(path, (json.dumps(finite_json(content), indent=1, allow_nan=False) + "\n").encode("ascii"))


def _row(row: EvalRow, targets: Sequence[TargetAnswers]) -> dict[str, Any]:
    return asdict(row) | {"answers": {target.name: _answers(target, row.id) for target in targets}}


def _answers(target: TargetAnswers, row_id: str) -> dict[str, Any]:
    answers: dict[str, Any] = {"greedy": _answer(target.greedy[row_id].answers[0])}
    if row_id in target.samples:
        answers["samples"] = list(map(_answer, target.samples[row_id].answers))
    for name, answered in (("shuffled_images", target.shuffled), ("blank_images", target.blank)):
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
        **turns_to_json(answer),
    }


def _skipped(target: TargetAnswers) -> list[dict[str, Any]]:
    return [{"index": index, "reason": reason} for index, reason in sorted(target.skipped.items())]


def finite_json(value: Any) -> Any:
    """The tree with null for non-finite numbers, and keys as strings."""
    if isinstance(value, float):
        return json_number(value)
    if isinstance(value, Mapping):
        return {str(key): finite_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(each) for each in value]
    return value
