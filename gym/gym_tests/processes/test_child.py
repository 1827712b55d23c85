"""Child processes: one without the watcher that would end it, and one whose id another process has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fovea_gym.processes.child import ChildProcess


def test_a_child_whose_watcher_cannot_start_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    before = set(psutil.Process().children())
    # the watcher's interpreter
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError):
        ChildProcess(command, os.environ)
    assert set(psutil.Process().children()) <= before


def test_a_process_that_has_the_id_of_a_child_that_ended_is_left_alone() -> None:
    child = ChildProcess([sys.executable, "-c", ""], os.environ)
    assert child.wait() == 0
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as other:
        # as if the kernel had given it the id, which no member of the child's group has any more
        child._process.pid = other.pid
        child.close({other.pid})
        assert other.poll() is None
        other.kill()
