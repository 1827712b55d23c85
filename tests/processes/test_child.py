"""A child process without the watcher that would end it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from fovea.processes.child import ChildProcess


def test_a_child_whose_watcher_cannot_start_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    before = set(psutil.Process().children())
    # the watcher's interpreter
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError):
        ChildProcess(command, os.environ)
    assert set(psutil.Process().children()) <= before
