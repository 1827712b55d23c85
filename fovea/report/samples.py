"""Sample records of a run folder: written per step, and read one step at a time.

samples/step-000050.jsonl holds one record per line, samples/images/<hash>.png each image once, and
samples/index.jsonl one line per step with the summaries of its records, which lists and filters need.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fovea.report.record_json import record_from_json, record_to_json, summary_from_json, summary_to_json
from fovea.report.records import GroupSummary, SampleRecord, summary_of
from fovea_gym.errors import DataError
from fovea_gym.utils.bounded import append_to, read_file, read_lines
from fovea_gym.utils.files import write_atomically

INDEX_FILE = "index.jsonl"
BAD_CONTENT = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""Exceptions of reading JSON of another shape."""
_STEP = re.compile(r"[0-9]{6,15}")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedStep:
    """The summaries of one step's records, in order."""

    step: int
    groups: tuple[GroupSummary, ...]


def write_samples(run_dir: Path, step: int, records: Sequence[SampleRecord]) -> None:
    """Write the records of one step; records of an earlier attempt at it (before a resume) are replaced."""
    lines = [json.dumps(record_to_json(record), allow_nan=False) + "\n" for record in records]
    write_atomically(step_path(run_dir, step), "".join(lines).encode())
    entry = {"step": step, "groups": [summary_to_json(summary_of(record)) for record in records]}
    with append_to(samples_folder(run_dir) / INDEX_FILE) as index:
        index.write(json.dumps(entry, allow_nan=False) + "\n")


def drop_samples(run_dir: Path, *, after: int) -> None:
    """Delete the records of the steps after one, which a run that goes on from there takes anew."""
    for step in sample_steps(run_dir):
        if step > after:
            step_path(run_dir, step).unlink()
    index = samples_folder(run_dir) / INDEX_FILE
    if index.exists():
        lines = read_lines(index, within=run_dir)
        write_atomically(index, b"".join(line for line in lines if _is_entry_until(line, after)))


def _is_entry_until(line: bytes, last: int) -> bool:
    try:
        return line.endswith(b"\n") and index_line(line).step <= last
    except BAD_CONTENT:
        return False


def sample_steps(run_dir: Path) -> list[int]:
    """Steps with sample records, in ascending order."""
    names = (path.stem.removeprefix("step-") for path in samples_folder(run_dir).glob("step-*.jsonl"))
    return sorted(int(name) for name in names if _STEP.fullmatch(name))


def read_step(run_dir: Path, step: int) -> tuple[SampleRecord, ...]:
    """The records of one step; FileNotFoundError where it has none, DataError where its file holds something else."""
    path = step_path(run_dir, step)
    content = read_file(path, within=run_dir)
    try:
        # split at "\n" only: str.splitlines would also cut inside a text with a line separator
        rows = [json.loads(line) for line in content.decode("utf-8").split("\n") if line]
        return tuple(map(record_from_json, rows))
    except BAD_CONTENT as error:
        raise DataError(f"{path} holds no sample records ({error!r}); delete that file") from error


def index_line(line: str | bytes) -> IndexedStep:
    """A line of samples/index.jsonl; one of BAD_CONTENT where it is none."""
    row = json.loads(line)
    return IndexedStep(step=int(row["step"]), groups=tuple(map(summary_from_json, row["groups"])))


def samples_folder(run_dir: Path) -> Path:
    """The folder of a run's sample records, which a young run does not have."""
    return run_dir / "samples"


def step_path(run_dir: Path, step: int) -> Path:
    """The file of a step's records."""
    return samples_folder(run_dir) / f"step-{step:06d}.jsonl"
