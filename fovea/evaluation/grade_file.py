"""Answers in a JSONL file, scored as a run scores them; one line is in memory at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fovea.data.bad_rows import OTHER
from fovea.environments.dataset_prompts import ON_BAD_ROW, bad_row
from fovea.environments.graders.base import Gradable
from fovea.environments.graders.by_name import grader_of
from fovea.errors import BadRowError, ConfigError, DataError

MAX_LISTED_LINES = 10
"""Of the rows that could not be graded for one reason."""


@dataclass(slots=True, kw_only=True)
class Ungraded:
    """Rows that could not be graded for one reason."""

    rows: int = 0
    first_lines: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Summary:
    """What a file came to."""

    rows: int = 0
    graded: int = 0
    mean_score: float | None = None
    """Over the graded rows."""
    ungraded: dict[str, Ungraded] = field(default_factory=dict)
    """By reason; the words of docs/data.md."""

    def add_score(self, score: float) -> None:
        mean = self.mean_score or 0.0
        self.rows, self.graded = self.rows + 1, self.graded + 1
        self.mean_score = mean + (score - mean) / self.graded

    def add_ungraded(self, reason: str, line: int) -> None:
        self.rows += 1
        same = self.ungraded.setdefault(reason, Ungraded())
        same.rows += 1
        if len(same.first_lines) < MAX_LISTED_LINES:
            same.first_lines.append(line)


def grade_file(name: Gradable, file: Path, write: Callable[[bytes], object]) -> Summary:
    """Score every row and hand it on as a line of JSON; DataError at the end where none could be graded."""
    grade = grader_of(name, _good_rows(file))
    summary = Summary()
    problem = "it has no rows"
    for number, line in _lines(file):
        row: dict[str, object] = {}
        try:
            row = row_of(line, f"line {number}")
            graded = grade(_prediction(row, f"line {number}"), row, f"line {number}")
        except DataError as error:
            problem = _without_advice(error)
            summary.add_ungraded(error.reason if isinstance(error, BadRowError) else OTHER, number)
            row |= {"score": None, "parts": {}, "reason": problem}
        else:
            summary.add_score(graded.score)
            row |= {"score": graded.score, "parts": dict(graded.parts), "reason": graded.reason}
        write(_as_line(row))
    if not summary.graded:
        raise DataError(f"{file}: none of {summary.rows} rows could be graded; the last problem: {problem}")
    return summary


def check_files(name: Gradable, file: Path, out: Path | None) -> None:
    """ConfigError for files that would be spoilt or cannot be read as often as needed."""
    if not file.exists():
        raise ConfigError(f"{file}: no such file; give a JSONL file of rows with prediction and truth")
    if out is not None and out.exists() and out.samefile(file):
        raise ConfigError(f"--out {out} is the file that is graded; name another one")
    if name == "caption" and not file.is_file():
        raise ConfigError(f"{file} is no regular file, but captions are read twice; save them to one first")


def row_of(line: bytes, where: str) -> dict[str, object]:
    """A line as an object; BadRowError where it is none."""
    try:
        row = json.loads(line.decode("utf-8-sig"), parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise bad_row(where, f"no JSON ({str(error).partition(':')[0]})", "row_unreadable") from error
    if not isinstance(row, dict):
        raise bad_row(where, f"JSON of type {type(row).__name__}, not an object", "row_unreadable")
    return row


def _finite(number: str) -> float:
    """NaN and Infinity are no JSON, and 1e999 would be written as one of them."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is no number of JSON")
    return value


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers; empty ones are no rows."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, line


def _good_rows(file: Path) -> Iterator[dict[str, object]]:
    for number, line in _lines(file):
        try:
            yield row_of(line, f"line {number}")
        except BadRowError:
            continue  # counted when the rows are graded


def _prediction(row: dict[str, object], where: str) -> str:
    prediction = row.get("prediction")
    if prediction is None:
        raise bad_row(where, "prediction is missing", "prediction_missing")
    if not isinstance(prediction, str):
        raise bad_row(where, f"prediction is of type {type(prediction).__name__}, not a text", "prediction_kind")
    return prediction


def _without_advice(error: DataError) -> str:
    """No run is going on that could skip rows."""
    return str(error).removesuffix(f"; {ON_BAD_ROW}")


def _as_line(row: dict[str, object]) -> bytes:
    # half a character (a lone surrogate) has no bytes, but its escape is JSON's own
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
