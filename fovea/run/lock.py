"""The lock of a run folder: one process at a time writes into it.

The kernel drops the lock (`flock`) when its process ends, however it ends. The lock file names the owner, for the error
message of a second process, and for hosts that share a file system whose locks do not work across hosts.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from fovea.processes.owner import Owner
from fovea_gym.errors import ConfigError
from fovea_gym.utils.bounded import append_to, read_file

LOCK_FILE = "run.lock"
MAX_CHARS = 10_000
"""Characters of a lock file that are read; an owner takes about a hundred."""
MAX_PID = 2**22
"""Largest process id of Linux (proc(5), pid_max)."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems without locks, such as some mounts of Lustre and NFS."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of an existing folder; ConfigError, which names the owner, if another process holds it."""
    with append_to(folder / LOCK_FILE) as file:
        _take(file, folder)
        try:
            yield
        finally:
            file.truncate(0)  # emptied, not deleted: another process may have the file open already


def owner_of(folder: Path) -> Owner | None:
    """The process that the lock file of a folder names; None if it names none. The folder may be from a stranger."""
    try:
        text = read_file(folder / LOCK_FILE, within=folder).decode("utf-8", errors="replace")
        owner = _owner(io.StringIO(text))
    except FileNotFoundError:
        return None
    return owner if owner and type(owner.pid) is int and 0 < owner.pid <= MAX_PID else None


def was_left_by(pid: int, folder: Path) -> bool:
    """True if a process ended while it held the lock of a folder, as when a C library calls `_exit`."""
    owner = owner_of(folder)
    return owner is not None and owner.is_here and owner.pid == pid


def _take(file: TextIO, folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(_in_use(folder, _owner(file))) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        owner = _owner(file)
        if owner is not None and owner.is_here and owner.is_alive:
            raise ConfigError(_in_use(folder, owner)) from None
    if not _is_at(file, folder / LOCK_FILE):
        raise ConfigError(f"run_dir={folder} was just deleted by a run that ended before its first step; start again")
    owner = _owner(file)
    if owner is not None and not owner.is_here:
        raise ConfigError(
            f"run_dir={folder} is locked by {owner}, and this host cannot tell whether that process still runs; if it "
            f"has ended, delete {folder / LOCK_FILE}, else set another run_dir"
        )
    file.truncate(0)
    file.write(json.dumps(asdict(Owner.this_process())))
    file.flush()


def _is_at(file: TextIO, path: Path) -> bool:
    """True if an open file is the one at this path; its folder may have been deleted since it was opened."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _in_use(folder: Path, owner: Owner | None) -> str:
    return (
        f"run_dir={folder} is in use by {owner or 'another process'}, and two runs in one folder would overwrite each "
        "other; wait until it has ended or stop it, or set another run_dir"
    )


def _owner(file: TextIO) -> Owner | None:
    """The owner that the lock file names; None if it names none, since it was released or is being written."""
    file.seek(0)
    try:
        return Owner(**json.loads(file.read(MAX_CHARS)))
    except (ValueError, TypeError, RecursionError):
        return None
