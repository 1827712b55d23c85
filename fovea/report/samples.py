"""Sample records of a run folder: written per step, and read one step at a time.

samples/step-000050.jsonl holds one record per line, and samples/images/<hash>.png holds each image once.
samples/index.jsonl holds one line per step with the summaries of its records, which lists and filters need.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from fovea.evaluation.records import ANSWERED_ROW, AnsweredRow
from fovea_gym.errors import DataError
from fovea_gym.utils.bounded import append_to, read_file, read_lines
from fovea_gym.utils.files import write_atomically
from fovea_gym.utils.stored import Number, from_json, to_json

INDEX_FILE = "index.jsonl"
_STEP = re.compile(r"[0-9]{6,15}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """The fields of a group that filters and lists need, so that they do not have to read its record."""

    kind: str
    row: str
    """Hash of question, truth and images, which identifies the same row in other steps and other runs."""
    rewards: tuple[Number, ...] = ()
    """Reward of each answer."""
    num_truncated: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedStep:
    """The summaries of one step's groups, in the order of its records."""

    step: int
    groups: tuple[GroupSummary, ...]


INDEXED_STEP = TypeAdapter(IndexedStep)


def indexed(step: int, records: Sequence[AnsweredRow]) -> IndexedStep:
    """The index entry of a step with these records."""
    return IndexedStep(step=step, groups=tuple(map(_summary, records)))


def _summary(record: AnsweredRow) -> GroupSummary:
    # a data set may hold lone surrogates, which UTF-8 cannot encode
    words = [record.question, record.truth, *(image.name for image in record.images)]
    row = hashlib.sha256("\0".join(words).encode("utf-8", errors="surrogatepass")).hexdigest()[:12]
    return GroupSummary(
        kind=record.kind,
        row=row,
        rewards=tuple(answer.reward for answer in record.answers),
        num_truncated=sum(answer.was_truncated for answer in record.answers),
    )


def write_samples(run_dir: Path, step: int, records: Sequence[AnsweredRow]) -> None:
    """Write the records of one step; they replace the records of an earlier attempt (before a resume)."""
    lines = [to_json(ANSWERED_ROW, record) + "\n" for record in records]
    write_atomically(step_path(run_dir, step), "".join(lines).encode())
    with append_to(samples_folder(run_dir) / INDEX_FILE) as index:
        index.write(to_json(INDEXED_STEP, indexed(step, records)) + "\n")


def drop_samples(run_dir: Path, *, after: int) -> None:
    """Delete the records of all steps later than `after`, which a run that resumes there will repeat."""
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
    except DataError:
        return False


def sample_steps(run_dir: Path) -> list[int]:
    """The steps that have sample records, in ascending order."""
    names = (path.stem.removeprefix("step-") for path in samples_folder(run_dir).glob("step-*.jsonl"))
    return sorted(int(name) for name in names if _STEP.fullmatch(name))


def read_step(run_dir: Path, step: int) -> tuple[AnsweredRow, ...]:
    """Read the records of one step; FileNotFoundError if it has none, DataError if its file is damaged."""
    path = step_path(run_dir, step)
    content = read_file(path, within=run_dir)
    # split at "\n" only: str.splitlines would also split at a line separator inside a text
    lines = filter(None, content.split(b"\n"))
    return tuple(from_json(ANSWERED_ROW, line, f"{path} does not hold sample records") for line in lines)


def index_line(line: str | bytes) -> IndexedStep:
    """Parse a line of samples/index.jsonl; DataError if it is not an index entry."""
    return from_json(INDEXED_STEP, line, f"a line of samples/{INDEX_FILE} is not an entry", "delete that line")


def samples_folder(run_dir: Path) -> Path:
    """The folder of a run's sample records, which does not exist before the first record."""
    return run_dir / "samples"


def step_path(run_dir: Path, step: int) -> Path:
    """The file of a step's records."""
    return samples_folder(run_dir) / f"step-{step:06d}.jsonl"
