"""Atomic writes of files and folders, and floats as JSON numbers."""

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
"""Age from which on no process is assumed to still write a temporary file."""


def json_number(value: float) -> float | None:
    """A float for JSON; None (null) stands for NaN and infinity, which JSON does not have."""
    return float(value) if math.isfinite(value) else None


def from_json_number(value: float | None) -> float:
    """The float of a JSON number; null is NaN."""
    return math.nan if value is None else float(value)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary path in the folder of `path`; it is flushed and renamed to `path` at the end of the block.

    Readers see the old file or the new one, never a partial one, even after a power failure. An error in the block
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
    """Write a file so that readers see either the old or the new content, never a part of it."""
    with atomic_file(path) as partial:
        partial.write_bytes(content)


def complete_bytes(folder: Path) -> int:
    """Total bytes of the complete files in a folder, where other processes may be writing with `atomic_file`."""
    return sum(map(_size, folder.glob("[!.]*")))


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # deleted after it was listed
        return 0


def delete_abandoned(folder: Path) -> None:
    """Delete temporary files that killed processes left in a folder at least a day ago; errors are ignored."""
    for partial in folder.glob(_PARTIALS):
        with suppress(OSError):
            if partial.stat().st_mtime < time.time() - _ABANDONED_SECONDS:
                partial.unlink()


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """An empty temporary folder next to `path`; it is flushed and renamed to `path` at the end of the block.

    Its files get the default permissions of the umask. An error in the block deletes the temporary folder. `path` must
    be absent or empty, and have one writer at a time.
    """
    path = path.absolute()  # "." has no name
    # a fixed name, so that the next process deletes what a killed one left, which may be gigabytes
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with os_errors(path):
            yield partial
        readable = partial.stat().st_mode & 0o666
        for written in (*partial.rglob("*"), partial):
            if written.is_file():
                written.chmod(readable)  # safetensors makes its files readable only to the owner
            flush(written)
        os.replace(partial, path)
        flush(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def os_errors(path: Path) -> Iterator[None]:
    """Convert errors of safetensors and tokenizers, which are in Rust, about writing `path` to OSError."""
    try:
        yield
    except Exception as error:
        number = _NUMBER_OF_RUST.search(str(error))
        if number is None or isinstance(error, FoveaError | OSError):
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def flush(path: Path) -> None:
    """Wait until the content of a file, or the entries of a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
