"""Writing a file so that a crash leaves it old or new, and numbers as JSON has them."""

from __future__ import annotations

import math
import os
from pathlib import Path


def json_number(value: float) -> float | None:
    """JSON has no NaN and no infinity: null stands for them."""
    return float(value) if math.isfinite(value) else None


def from_json_number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def write_atomically(path: Path, content: bytes) -> None:
    """Whoever looks at `path`, even after a crash, sees the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
