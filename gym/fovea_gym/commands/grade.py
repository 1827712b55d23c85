"""`grade`: scoring of the answers in a JSONL file, streamed line by line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fovea_gym.environments.dataset_prompts import bad_row
from fovea_gym.errors import OTHER, BadRowError, ConfigError, DataError
from fovea_gym.graders.by_name import Gradable, grader_of

MAX_LISTED_LINES = 10
"""Line numbers listed for each reason that rows could not be graded."""


@dataclass(slots=True, kw_only=True)
class Ungraded:
    """Rows that could not be graded for one reason."""

    rows: int = 0
    first_lines: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class GradeSummary:
    """Counts and mean score of a graded file."""

    rows: int = 0
    graded: int = 0
    mean_score: float | None = None
    """Mean over the graded rows; None without any."""
    ungraded: dict[str, Ungraded] = field(default_factory=dict)
    """By reason: one of those that docs/data.md lists."""

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


def grade_file(name: Gradable, file: Path, write: Callable[[bytes], object]) -> GradeSummary:
    """Score every row and pass it to `write` as a line of JSON; DataError at the end where no row could be graded."""
    grade = grader_of(name, _readable_rows(file))
    summary = GradeSummary()
    problem = "it has no rows"
    for number, line in _lines(file):
        row: dict[str, object] = {}
        try:
            row = row_of(line, f"line {number}")
            graded = grade(_prediction(row, f"line {number}"), row, f"line {number}")
        except DataError as error:
            problem, reason = (error.problem, error.reason) if isinstance(error, BadRowError) else (str(error), OTHER)
            summary.add_ungraded(reason, number)
            row |= {"score": None, "parts": {}, "reason": problem}
        else:
            summary.add_score(graded.score)
            row |= {"score": graded.score, "parts": dict(graded.parts), "reason": graded.reason}
        # a lone surrogate cannot be encoded as UTF-8, but JSON has an escape for it
        write(json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
    if not summary.graded:
        raise DataError(f"{file}: none of {summary.rows} rows could be graded; the last problem: {problem}")
    return summary


def check_files(name: Gradable, file: Path, out: Path | None) -> None:
    """ConfigError where the input is missing, would be overwritten, or must be read twice and cannot be."""
    if not file.exists():
        raise ConfigError(f"{file}: no such file; give a JSONL file of rows with prediction and truth")
    if out is not None and out.exists() and out.samefile(file):
        raise ConfigError(f"--out {out} is the file that is graded; name another one")
    if name == "caption" and not file.is_file():
        raise ConfigError(f"{file} is not a regular file, and grading captions reads it twice; save it to a file first")


def row_of(line: bytes, where: str) -> dict[str, object]:
    """A line parsed as a JSON object; BadRowError where it is not one."""
    try:
        row = json.loads(line.decode("utf-8-sig"), parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise bad_row(where, f"not JSON ({str(error).partition(':')[0]})", "row_unreadable") from error
    if not isinstance(row, dict):
        raise bad_row(where, f"JSON of type {type(row).__name__}, not an object", "row_unreadable")
    return row


def _finite(number: str) -> float:
    """A finite float from a JSON number; ValueError for NaN and Infinity, which JSON does not have."""
    # 1e999 is a JSON number, but parses to infinity
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not a finite JSON number")
    return value


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, line


def _readable_rows(file: Path) -> Iterator[dict[str, object]]:
    for number, line in _lines(file):
        with suppress(BadRowError):  # counted later, when the rows are graded
            yield row_of(line, f"line {number}")


def _prediction(row: dict[str, object], where: str) -> str:
    prediction = row.get("prediction")
    if prediction is None:
        raise bad_row(where, "prediction is missing", "prediction_missing")
    if not isinstance(prediction, str):
        raise bad_row(where, f"prediction is of type {type(prediction).__name__}, not a text", "prediction_kind")
    return prediction
