"""Occlusion maps of a run's answers: JSON files in the folder `saliency`, each with a picture.

Axes: `R`, `C` rows and columns of patches.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from fovea_gym.errors import DataError
from fovea_gym.utils.bounded import read_file
from fovea_gym.utils.files import write_atomically

FOLDER = "saliency"
MAX_MAPS = 500
"""Largest number of maps of a run."""
MAX_PATCHES = 1024
"""Largest number of patches of a picture; each needs a pass of the model."""
_MAX_MIB = 0.25
"""Largest size of a file: patches take 20 KB, and the rest is for the question and the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerMap:
    """The drop of an answer's log-prob for each hidden patch of a picture."""

    id: str
    """Task id."""
    question: str
    answer: str
    image: int
    """Number of the picture in the prompt, counted from 1."""
    weights: str
    """Name of the checkpoint or model that computed the log-probs, without the run's path, which is private."""
    logprob: float
    """Log-prob of the answer with the whole picture, in nats."""
    patch_px: int
    size: tuple[int, int]
    """Width and height of the picture in pixels."""
    falls: tuple[tuple[float, ...], ...]
    """Drops in nats [R][C]; below 0 where the answer is more likely without the patch."""

    def __post_init__(self) -> None:
        columns, rows = (-(-side // self.patch_px) for side in self.size)
        if rows * columns > MAX_PATCHES or [len(row) for row in self.falls] != [columns] * rows:
            raise ValueError(f"falls are not {rows} x {columns} patches of {self.patch_px} px in {self.size}")
        if not all(map(math.isfinite, (self.logprob, *(fall for row in self.falls for fall in row)))):
            raise ValueError("a log-prob is not finite")


def map_path(run_dir: Path, split: str, row: int, found: AnswerMap) -> Path:
    """The file of a map; a later map of the same answer replaces it."""
    words = json.dumps([found.id, found.answer, found.image]).encode()
    return run_dir / FOLDER / f"{split}-{row:06d}-{hashlib.sha256(words).hexdigest()[:12]}.json"


def write_map(path: Path, found: AnswerMap) -> None:
    """Write a map as JSON."""
    write_atomically(path, (json.dumps(asdict(found), allow_nan=False) + "\n").encode("ascii"))


def map_files(run_dir: Path) -> list[Path]:
    """The files of a run's maps, at most MAX_MAPS of them."""
    return sorted((run_dir / FOLDER).glob("*.json"))[:MAX_MAPS]


def read_maps(run_dir: Path) -> dict[Path, AnswerMap]:
    """All maps of a run by file; DataError for a file without a valid map."""
    return {path: _read_map(path, run_dir) for path in map_files(run_dir)}


def _read_map(path: Path, run_dir: Path) -> AnswerMap:
    try:
        row = json.loads(read_file(path, within=run_dir, max_mib=_MAX_MIB))
        width, height = row["size"]
        return AnswerMap(
            id=str(row["id"]),
            question=str(row["question"]),
            answer=str(row["answer"]),
            image=_count(row["image"]),
            weights=str(row["weights"]),
            logprob=float(row["logprob"]),
            patch_px=_count(row["patch_px"]),
            size=(_count(width), _count(height)),
            falls=tuple(tuple(map(float, of_row)) for of_row in row["falls"]),
        )
    except DataError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"{path} is not a valid map ({error!r}); delete that file") from error


def _count(value: object) -> int:
    if isinstance(value, int) and value > 0:
        return value
    raise ValueError(f"{value!r} is not a whole number above 0")


_SAMPLE = re.compile(r"([0-9]{1,15}):([0-9]{1,6}):([0-9]{1,6})")


@dataclass(frozen=True, slots=True)
class SamplePlace:
    """The place of a recorded training answer; group and answer count from 1, as on the page."""

    step: int
    group: int
    answer: int


def sample_place(text: str) -> SamplePlace | None:
    """The place that STEP:GROUP:ANSWER names; None for any other text."""
    found = _SAMPLE.fullmatch(text)
    return SamplePlace(*map(int, found.groups())) if found else None
