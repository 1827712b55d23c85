"""Room on the disk for a checkpoint: asked for before a save, and named when a save has failed for the lack of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fovea.errors import TrainError

GIB = 2**30


def folder_bytes(folder: Path) -> int:
    """Size of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextmanager
def room_for(what: str, folder: Path, needed_bytes: int) -> Iterator[None]:
    """A block that writes about so many bytes into an existing folder; TrainError where they do not fit.

    Nothing is begun where less is free. The block may still fail: of others' files, a quota or a limit of file sizes
    nothing is known before.
    """
    free_bytes = shutil.disk_usage(folder).free
    figures = f"it needs about {_shown(needed_bytes)}, and {_shown(free_bytes)} are free in {folder}"
    way_out = "make room there and go on with resume=auto"
    if free_bytes < needed_bytes:
        raise TrainError(f"there is no room for {what}: {figures}; {way_out}")
    try:
        yield
    except OSError as error:
        raise TrainError(f"{what} could not be written ({error.strerror or error}): {figures}; {way_out}") from error


def _shown(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"
