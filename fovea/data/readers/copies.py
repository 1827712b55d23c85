"""Local copies of data files, made once and kept in `data.cache_dir`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fovea.errors import DataError
from fovea.utils.files import atomic_file


def copied_once(folder: Path, name: str, make: Callable[[Path], object]) -> Path:
    """Return `folder/name`, written by `make(path)` unless it is there already; two processes may do so at once.

    Raises DataError where the disk refuses.
    """
    copy = folder / name
    try:
        if not copy.exists():
            with atomic_file(copy) as partial:
                make(partial)
    except OSError as error:
        raise DataError(
            f"a copy of {name} cannot be kept in {folder} ({error.strerror or error}); make room there, or set "
            "data.cache_dir to a folder on another disk"
        ) from error
    return copy
