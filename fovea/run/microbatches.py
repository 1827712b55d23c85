"""The largest micro-batches that fitted the memory, which a run remembers across restarts.

A single process halves them and continues. One of several ranks cannot: the run ends, and leaves the size in a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from fovea.errors import MicrobatchMemoryError
from fovea_gym.errors import DataError
from fovea_gym.utils.bounded import read_file
from fovea_gym.utils.files import write_atomically

MICROBATCHES_FILE = "microbatches.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchTokens:
    """The size limit of micro-batches, in tokens."""

    setting: int
    """Value of `train.max_tokens_per_microbatch` at that time. If it has changed since, the limit no longer applies."""
    limit: int
    """The limit in effect: the setting, or less after memory ran out."""


@contextmanager
def leaving_limit(folder: Path, setting: int) -> Iterator[None]:
    """Within the block, write a smaller limit into the run's folder when memory runs out on one of several ranks."""
    try:
        yield
    except MicrobatchMemoryError as error:
        left = MicrobatchTokens(setting=setting, limit=error.next_max_tokens)
        write_atomically(folder / MICROBATCHES_FILE, json.dumps(asdict(left)).encode())
        raise


def left_limit(folder: Path) -> MicrobatchTokens | None:
    """The limit that an earlier attempt left in the run's folder; None if there is none."""
    file = folder / MICROBATCHES_FILE
    if not file.exists():
        return None
    try:
        left = MicrobatchTokens(**json.loads(read_file(file, within=folder)))
        return MicrobatchTokens(setting=int(left.setting), limit=int(left.limit))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise DataError(f"{file} is not a valid record of a micro-batch size ({error}); delete the file") from error
