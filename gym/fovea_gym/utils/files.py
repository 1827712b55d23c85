"""Files and folders that are complete under their name or not there, and floats as JSON numbers."""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from fovea_gym.errors import FoveaError

_NUMBER_OF_RUST = re.compile(r"\(os error (\d+)\)")
_PARTIALS = ".*.partial"
_ABANDONED_SECONDS = 24 * 3600
"""Age of a temporary file of which no process still writes."""


def json_number(value: float) -> float | None:
    """A float for JSON, which has no NaN and no infinity: None (null) stands for them."""
    return float(value) if math.isfinite(value) else None


def from_json_number(value: float | None) -> float:
    """The float of a JSON number; null is NaN."""
    return math.nan if value is None else float(value)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary path in the folder of `path`, flushed and renamed to it at the end of the block.

    Readers see the old file or the new one, never half of one, even after a power failure. An error in the block
    deletes the temporary file. Several processes may write the same path: the last one wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{uuid4().hex}.partial")
    try:
        yield partial
        flush(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file whose readers see the old content or the new one, never half of it."""
    with atomic_file(path) as partial:
        partial.write_bytes(content)


def complete_bytes(folder: Path) -> int:
    """Bytes of the files of a folder, in which other processes may be writing by `atomic_file`."""
    return sum(map(_size, folder.glob("[!.]*")))


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # deleted since it was listed
        return 0


def delete_abandoned(folder: Path) -> None:
    """Delete the temporary files that killed processes left in a folder a day ago or earlier, as far as that can be."""
    for partial in folder.glob(_PARTIALS):
        with suppress(OSError):
            if partial.stat().st_mtime < time.time() - _ABANDONED_SECONDS:
                partial.unlink()


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """An empty temporary folder beside `path`, flushed and renamed to it at the end of the block.

    Its files get the permissions of any new file, by the umask. An error in the block deletes the temporary folder.
    `path` must be absent or empty, and have one writer at a time.
    """
    path = path.absolute()  # "." has no name
    # one name for all: what a killed process left, which may be gigabytes, is deleted by the next one
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with os_errors(path):
            yield partial
        readable = partial.stat().st_mode & 0o666
        for written in (*partial.rglob("*"), partial):
            if written.is_file():
                written.chmod(readable)  # safetensors lets only the owner read what it writes
            flush(written)
        os.replace(partial, path)
        flush(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def os_errors(path: Path) -> Iterator[None]:
    """OSError for the errors by which safetensors and tokenizers, in Rust, say that `path` cannot be written."""
    try:
        yield
    except Exception as error:
        number = _NUMBER_OF_RUST.search(str(error))
        if number is None or isinstance(error, FoveaError | OSError):
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def flush(path: Path) -> None:
    """Wait until a file or the entries of a folder are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
