"""The file that lists why groups, episodes and held-out answers of a run have no score."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from fovea.errors import TrainError
from fovea.run.rollout_step import StepRollout
from fovea_gym.utils.bounded import append_to, check_inside, read_lines
from fovea_gym.utils.files import write_atomically

UNSCORED_FILE = "unscored.jsonl"


def record_unscored(folder: Path, warn: Callable[[str], None], step: int, rollout: StepRollout) -> None:
    """Append episodes and groups without a score to unscored.jsonl; TrainError if no group of the step has a score."""
    _write_unscored(folder, warn, step, [*rollout.failed, *rollout.unscored])
    if not rollout.groups:
        raise TrainError(
            f"none of the {len(rollout.unscored)} groups of step {step} could be scored; the last error: "
            f"{rollout.unscored[-1]}; fix it ({UNSCORED_FILE} in the run folder lists all errors) and continue "
            "with resume=auto"
        )


def record_unscored_answer(folder: Path, warn: Callable[[str], None], reason: str) -> None:
    """Append the reason for a held-out row without a score, or for a failed demonstration, to unscored.jsonl."""
    _write_unscored(folder, warn, None, [reason])


def unscored_hint(folder: Path) -> str | None:
    """A line with the number of episodes, groups and held-out answers without a score; None if all have one."""
    file = folder / UNSCORED_FILE
    count = sum(1 for _ in read_lines(file, within=folder)) if file.exists() else 0
    if not count:
        return None
    return f"not scored and left out: {count:,} groups, episodes and held-out answers; {UNSCORED_FILE} has the reasons"


def unscored_bytes(folder: Path) -> int:
    """Length of unscored.jsonl in bytes, which a checkpoint stores."""
    file = folder / UNSCORED_FILE
    return file.stat().st_size if file.exists() else 0


def cut_unscored(folder: Path, num_bytes: int) -> None:
    """Drop the lines of unscored.jsonl after a checkpoint, since the resumed run appends them again.

    Damaged lines, which a crash of the machine may leave, are dropped as well; another resume from the same checkpoint
    then keeps some of the later lines.
    """
    file = folder / UNSCORED_FILE
    if not file.exists():
        return
    check_inside(file, folder)
    os.truncate(file, min(num_bytes, file.stat().st_size))
    lines = list(read_lines(file, within=folder))
    whole = [line for line in lines if line.endswith(b"\n") and b"\0" not in line]
    if len(whole) < len(lines):
        write_atomically(file, b"".join(whole))


def _write_unscored(folder: Path, warn: Callable[[str], None], step: int | None, reasons: Sequence[str]) -> None:
    """Append to unscored.jsonl, with a warning for the first entry of a run."""
    if not reasons:
        return
    if not unscored_bytes(folder):
        warn(f"not scored and left out: {reasons[0]}; from here on such rows are only counted, see {UNSCORED_FILE}")
    with append_to(folder / UNSCORED_FILE) as file:
        file.writelines(json.dumps({"step": step, "reason": reason}) + "\n" for reason in reasons)
