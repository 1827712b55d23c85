"""Files of a run's answers to held-out rows: answers/NAME.jsonl in the run folder, one JSON object per row."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from fovea.errors import DataError
from fovea.evaluation.answer import turns_to_json
from fovea.evaluation.evaluator import AnsweredRow
from fovea.utils.bounded import read_lines
from fovea.utils.files import from_json_number, json_number, write_atomically

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
    kind: str
    question: str
    """Empty in files of earlier versions."""
    truth: str
    text: str
    reward: float
    accuracy: float
    is_truncated: bool


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


def _from_json(row: dict[str, object]) -> HeldOutAnswer:
    return HeldOutAnswer(
        id=str(row["id"]),
        kind=str(row["kind"]),
        question=str(row.get("question", "")),
        truth=str(row["truth"]),
        text=str(row["answer"]),
        reward=_number(row["reward"]),
        accuracy=_number(row["accuracy"]),
        is_truncated=row["finish"] == "length",
    )


def _number(value: object) -> float:
    if isinstance(value, int | float | None):
        return from_json_number(value)
    raise ValueError(f"{value!r} is not a number")
