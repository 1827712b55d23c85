"""Safe reads of files in an untrusted folder: only regular files of a limited size inside the folder.

A FIFO would block its reader, a device or a sparse file would fill the memory, and a symbolic link could expose or
overwrite a file elsewhere.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

from fovea_gym.errors import DataError

MAX_MIB = 256
"""Maximum size of a file that is read as a whole."""
MAX_LINE_MIB = 16
"""Maximum length of a line in a file that is read line by line."""
MIB = 2**20


def read_file(path: Path, *, within: Path | None = None, max_mib: float = MAX_MIB) -> bytes:
    """The content of a regular file; FileNotFoundError if there is no file, DataError for anything else.

    `within` is the folder that no link in the path may leave.
    """
    with open_file(path, within=within) as file:
        content = file.read(int(max_mib * MIB) + 1)
    if len(content) > max_mib * MIB:
        raise DataError(f"{path} has more than {max_mib:g} MiB, which no file of this kind has; delete it")
    return content


def open_file(path: Path, *, within: Path | None = None) -> BinaryIO:
    """Open a regular file for reading; raises the errors of `read_file`."""
    if within is not None:
        check_inside(path, within)
    # O_NONBLOCK: opening a FIFO without a writer would block
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise DataError(f"{path} is not a regular file, and is not read; delete it")


def read_lines(path: Path, *, within: Path | None = None) -> Iterator[bytes]:
    """The lines of a regular file with their line ends, one at a time; raises the errors of `read_file`."""
    with open_file(path, within=within) as file:
        yield from lines_of(file, path)


def lines_of(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """The lines of an open file with their line ends; DataError naming the path for a line that is too long."""
    while line := file.readline(MAX_LINE_MIB * MIB + 1):
        if len(line) > MAX_LINE_MIB * MIB:
            raise DataError(f"{path} has a line of more than {MAX_LINE_MIB} MiB; delete that line")
        yield line


def append_to(path: Path) -> TextIO:
    """Open a file for appending text; OSError for a link, which could point to any file."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    return os.fdopen(handle, "a+", encoding="utf-8", newline="\n")


def check_inside(path: Path, folder: Path) -> None:
    """Raise DataError if a link in the path leads out of the folder."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise DataError(
            f"{path} is a link, or below one, that leads out of {folder}, and nothing is read or written through it; "
            "put the file itself there"
        )


def check_tree(folder: Path, not_below: Collection[str] = ()) -> None:
    """Raise DataError if the folder contains a link that leads out of it, or anything other than files and folders.

    Folders named in `not_below` are not entered.
    """
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in not_below]
        for path in (Path(parent, name) for name in (*folders, *files)):
            kind = stat.S_IFMT(path.lstat().st_mode)
            if kind == stat.S_IFLNK:
                check_inside(path, folder)
            elif kind not in (stat.S_IFREG, stat.S_IFDIR):
                raise DataError(f"{path} is neither a file nor a folder, and is not read; delete it")
