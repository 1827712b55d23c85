"""Commands that start this Fovea."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fovea

SCRIPT = """
import os, subprocess, sys
from fovea_gym.utils.launch import with_this_fovea

command = [sys.executable, "-P", "-c", "import fovea; print(fovea.__file__)"]
subprocess.run(command, env=with_this_fovea(os.environ), check=True)
"""


def test_a_fovea_of_the_working_directory_is_that_of_its_children(tmp_path: Path) -> None:
    """Also where another one is installed."""
    (tmp_path / "fovea").symlink_to(Path(fovea.__file__).parent)
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=own, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == str(tmp_path / "fovea" / "__init__.py"), done.stderr
