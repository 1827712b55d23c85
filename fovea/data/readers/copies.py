"""Files made once and kept: complete under their name, or not there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from fovea.errors import DataError


def copied_once(folder: Path, name: str, make: Callable[[Path], object]) -> Path:
    """As `made_once`, in a folder of `data.cache_dir`; DataError where the disk refuses."""
    try:
        return made_once(folder, name, make)
    except OSError as error:
        raise DataError(
            f"a copy of {name} cannot be kept in {folder} ({error.strerror or error}); make room there, or set "
            "data.cache_dir to a folder on another disk"
        ) from error


def made_once(folder: Path, name: str, make: Callable[[Path], object]) -> Path:
    """`folder/name`, made by `make(path)` where it is not there yet; two processes may do so at once."""
    final = folder / name
    if final.exists():
        return final
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{uuid4().hex}.partial"
    try:
        make(partial)
        os.replace(partial, final)
    finally:
        partial.unlink(missing_ok=True)
    return final
