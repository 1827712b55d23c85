"""The JSON file of `fovea eval --json`: metrics of every target, and every answer to every row."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from fovea.evaluation.answer import SaidMessage, SampledAnswer, turns_to_json
from fovea.evaluation.comparison import EvalResults, EvalRow, TargetAnswers, TargetMetrics
from fovea.evaluation.evaluator import AnsweredRow
from fovea_gym.errors import DataError
from fovea_gym.utils.bounded import read_lines
from fovea_gym.utils.files import from_json_number, json_number, write_atomically


def write_json(
    path: Path,
    results: EvalResults,
    metrics: Sequence[TargetMetrics],
    about: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> None:
    """Write results and metrics to `path`; `about` says which rows. Accuracies are in 0..1, null where undefined."""
    write_tree(path, {**results_json(results, metrics, about), "settings": settings})


def results_json(results: EvalResults, metrics: Sequence[TargetMetrics], about: Mapping[str, Any]) -> dict[str, Any]:
    """Results and metrics as `write_json` has them, without the settings."""
    return {
        **about,
        "targets": [asdict(each) for each in metrics],
        "banned_tokens": {target.name: asdict(target.banned) for target in results.targets if target.banned},
        "skipped": {target.name: _skipped(target) for target in results.targets},
        "unscored": {target.name: list(target.unscored) for target in results.targets},
        "rows": [_row(row, results.targets) for row in results.rows],
    }


def write_tree(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON with null for non-finite numbers."""
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


ANSWERS_FOLDER = "answers"
_NAME = re.compile(r"test-final|test-after-warmup|test-before|dev-warmup|dev-step-[0-9]{6,15}")
_FIRST = ("test-final", "test-after-warmup", "test-before")


def write_answers(run_dir: Path, name: str, rows: Sequence[AnsweredRow]) -> None:
    """Write the greedy answers of one evaluation, such as `dev-step-000050`, over those of an earlier attempt."""
    lines = (json.dumps(_to_json(row), allow_nan=False) + "\n" for row in rows)
    write_atomically(run_dir / ANSWERS_FOLDER / f"{name}.jsonl", "".join(lines).encode("ascii"))


def _to_json(row: AnsweredRow) -> dict[str, object]:
    answer = row.answers[0]
    return {
        "id": row.id,
        "index": row.index,
        "kind": row.kind,
        "image_type": row.image_type,
        "question": row.question,
        "truth": row.truth,
        "answer": answer.text,
        "reward": json_number(answer.reward),
        "accuracy": json_number(answer.accuracy),
        "parts": {name: json_number(value) for name, value in answer.parts.items()},
        "finish": answer.finish,
        **turns_to_json(answer),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutAnswer:
    """A line of a file of answers."""

    id: str
    index: int
    """Position in its split."""
    kind: str
    image_type: str | None
    question: str
    truth: str
    answer: SampledAnswer


def answer_files(run_dir: Path) -> list[str]:
    """Names of the evaluations whose answers a run has kept: those on test rows, then those on dev, newest first."""
    names = {path.stem for path in (run_dir / ANSWERS_FOLDER).glob("*.jsonl")}
    of_dev = sorted((name for name in names if _NAME.fullmatch(name) and name not in _FIRST), reverse=True)
    return [*(name for name in _FIRST if name in names), *of_dev]


def read_answers(run_dir: Path, name: str, max_rows: int) -> list[HeldOutAnswer]:
    """The first `max_rows` answers of an evaluation; FileNotFoundError without a file, DataError for other content."""
    path = run_dir / ANSWERS_FOLDER / f"{name}.jsonl"
    try:
        return [_from_json(json.loads(line)) for line in islice(read_lines(path, within=run_dir), max_rows)]
    except DataError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"{path} holds no answers ({error!r}); delete that file") from error


def _said(row: dict[str, Any]) -> SaidMessage:
    tool, failed = str(row.get("name", "")), bool(row.get("failed", False))
    return SaidMessage(role=str(row["role"]), text=str(row["content"]), tool=tool, failed=failed)


def _from_json(row: dict[str, Any]) -> HeldOutAnswer:
    answer = SampledAnswer(
        text=str(row["answer"]),
        reward=_number(row["reward"]),
        accuracy=_number(row["accuracy"]),
        parts={str(name): _number(value) for name, value in row["parts"].items()},
        finish="length" if row["finish"] == "length" else "stop",
        turns=tuple(map(_said, row.get("turns", ()))),
    )
    return HeldOutAnswer(
        id=str(row["id"]),
        index=int(row["index"]),
        kind=str(row["kind"]),
        image_type=None if row["image_type"] is None else str(row["image_type"]),
        question=str(row["question"]),
        truth=str(row["truth"]),
        answer=answer,
    )


def _number(value: object) -> float:
    if isinstance(value, int | float | None):
        return from_json_number(value)
    raise ValueError(f"{value!r} is not a number")
