"""The JSON file of `fovea eval --json` with the metrics and all answers of every target; a run's answer files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from fovea.evaluation.comparison import EvalResults, TargetAnswers, TargetMetrics
from fovea.evaluation.records import ANSWERED_ROW, AnsweredRow, RecordedEpisode, TaskRow
from fovea_gym.utils.bounded import read_lines
from fovea_gym.utils.files import json_number, write_atomically
from fovea_gym.utils.stored import as_json, from_json, to_json

EPISODE = TypeAdapter(RecordedEpisode)


def write_json(
    path: Path,
    results: EvalResults,
    metrics: Sequence[TargetMetrics],
    about: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> None:
    """Write results and metrics to `path`; `about` describes the rows. Accuracies are in 0..1, null if undefined."""
    write_tree(path, {**results_json(results, metrics, about), "settings": settings})


def results_json(results: EvalResults, metrics: Sequence[TargetMetrics], about: Mapping[str, Any]) -> dict[str, Any]:
    """The results and metrics that `write_json` writes, without the settings."""
    return {
        **about,
        "targets": [asdict(each) for each in metrics],
        "banned_tokens": {target.name: asdict(target.banned) for target in results.targets if target.banned},
        "skipped": {
            target.name: [{"index": index, "reason": reason} for index, reason in sorted(target.skipped.items())]
            for target in results.targets
        },
        "unscored": {target.name: list(target.unscored) for target in results.targets},
        "rows": [_row(row, results.targets) for row in results.rows],
    }


def write_tree(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON with non-finite numbers replaced by null."""
    # ASCII with escapes, because texts of a data set may hold lone surrogates, which UTF-8 cannot encode
    write_atomically(path, (json.dumps(finite_json(content), indent=1, allow_nan=False) + "\n").encode("ascii"))


def _row(row: TaskRow, targets: Sequence[TargetAnswers]) -> dict[str, Any]:
    return asdict(row) | {"answers": {target.name: _answers(target, row.id) for target in targets}}


def _answers(target: TargetAnswers, row_id: str) -> dict[str, Any]:
    """A target's greedy answer, its sampled answers, and its answers with shuffled and with blank images."""
    answers: dict[str, Any] = {"greedy": as_json(EPISODE, target.greedy[row_id].answers[0])}
    if row_id in target.samples:
        answers["samples"] = [as_json(EPISODE, answer) for answer in target.samples[row_id].answers]
    for name, answered in (("shuffled_images", target.shuffled), ("blank_images", target.blank)):
        if row_id in answered:
            answers[name] = as_json(EPISODE, answered[row_id].answers[0])
    return answers


def finite_json(value: Any) -> Any:
    """The value with non-finite numbers replaced by null, and all keys converted to strings."""
    if isinstance(value, float):
        return json_number(value)
    if isinstance(value, Mapping):
        return {str(key): finite_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(each) for each in value]
    return value


ANSWERS_FOLDER = "answers"
_NAME = re.compile(r"test-final|test-after-warmup|test-before|dev-warmup|dev-step-[0-9]{6,15}")
_FIRST = ("test-final", "test-after-warmup", "test-before")


def write_answers(run_dir: Path, name: str, rows: Sequence[AnsweredRow]) -> None:
    """Write the greedy answers of an evaluation such as `dev-step-000050`; replaces those of an earlier attempt."""
    lines = (to_json(ANSWERED_ROW, replace(row, answers=row.answers[:1])) + "\n" for row in rows)
    write_atomically(run_dir / ANSWERS_FOLDER / f"{name}.jsonl", "".join(lines).encode("ascii"))


def answer_files(run_dir: Path) -> list[str]:
    """Names of a run's evaluations with stored answers: on test rows first, then on dev rows, newest first."""
    names = {path.stem for path in (run_dir / ANSWERS_FOLDER).glob("*.jsonl")}
    of_dev = sorted((name for name in names if _NAME.fullmatch(name) and name not in _FIRST), reverse=True)
    return [*(name for name in _FIRST if name in names), *of_dev]


def read_answers(run_dir: Path, name: str, max_rows: int) -> list[AnsweredRow]:
    """Read an evaluation's first `max_rows` answers; FileNotFoundError without a file, DataError if it is damaged."""
    path = run_dir / ANSWERS_FOLDER / f"{name}.jsonl"
    lines = islice(read_lines(path, within=run_dir), max_rows)
    return [from_json(ANSWERED_ROW, line, f"{path} does not hold answers") for line in lines]
