"""What the targets of the Makefile would do, in a folder where nothing is installed yet."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def planned(folder: Path, target: str) -> str:
    """The commands of a target, none of which runs."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    return subprocess.run(
        ["make", "--dry-run", target], cwd=folder, capture_output=True, text=True, check=True, timeout=30
    ).stdout


def test_the_demo_installs_what_a_run_needs_and_shows_it(tmp_path: Path) -> None:
    (install,) = [line for line in planned(tmp_path, "demo").splitlines() if " -m pip install " in line]
    assert install.endswith(" -e .")
    assert "--quiet" not in install


@pytest.mark.parametrize("target", ["test", "lint", "format"])
def test_what_a_developer_runs_installs_the_rest(target: str, tmp_path: Path) -> None:
    (install,) = [line for line in planned(tmp_path, target).splitlines() if " -m pip install " in line]
    assert install.endswith(" -e '.[dev]'")
