"""One process at a time holds a run folder, and a dead one holds nothing."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from fovea.processes.owner import Owner
from fovea.run.lock import LOCK_FILE, locked
from fovea_gym.errors import ConfigError

HOLD = "import sys; from pathlib import Path; from fovea.run.lock import locked\n"
HOLD += "with locked(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of a folder until its input ends."""
    arguments = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_process_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        named = rf"is in use by process {process.pid} on host {socket.gethostname()}, .* set another run_dir"
        with pytest.raises(ConfigError, match=named), locked(tmp_path):
            pass
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == process.pid, "its owner stays named"


def test_this_process_cannot_take_it_twice(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(ConfigError, match=rf"in use by process {os.getpid()}"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_a_killed_process_is_in_nobodys_way(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (tmp_path / LOCK_FILE).read_text(), "it could not clean up"
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()


def test_an_owner_on_another_host_is_for_the_user_to_judge(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text(json.dumps(asdict(Owner(host="node-17", pid=4, started="1"))))
    with (
        pytest.raises(ConfigError, match=r"locked by process 4 on host node-17, .* delete .*run\.lock"),
        locked(tmp_path),
    ):
        pass
    (tmp_path / LOCK_FILE).unlink()
    with locked(tmp_path):
        pass


def test_a_pid_that_now_belongs_to_another_process_is_told_apart(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        owner = Owner(**json.loads((tmp_path / LOCK_FILE).read_text()))
        assert owner.pid == process.pid
        assert owner.is_alive
        assert not replace(owner, started="1").is_alive
        process.kill()
        process.wait()
        assert not owner.is_alive


def test_without_locks_in_the_file_system_the_named_owner_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file system of a test machine lacks them, so the error of one that does stands in."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with holder(tmp_path) as process:
        monkeypatch.setattr(fcntl, "flock", no_locks)
        with pytest.raises(ConfigError, match=rf"in use by process {process.pid}"), locked(tmp_path):
            pass
        process.kill()
        process.wait()
        with locked(tmp_path):
            pass


def test_the_lock_of_a_folder_that_its_run_deletes_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take = fcntl.flock

    def delete_first(file: object, how: int) -> None:
        (tmp_path / LOCK_FILE).unlink()  # the run that failed: between the opening of the file and its lock
        take(file, how)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", delete_first)
    with pytest.raises(ConfigError, match=r"was just deleted by a run that ended .* start again"), locked(tmp_path):
        pass
