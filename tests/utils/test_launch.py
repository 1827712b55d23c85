"""Commands that start this Fovea, and the one that adds an extra to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import fovea
from fovea_gym.utils.installing import pip_install

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


class Installed:
    """A distribution as pip records it."""

    def __init__(self, origin: dict[str, object] | None) -> None:
        self._origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self._origin is None else json.dumps(self._origin)


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'fovea-rl[hub]'"),
        ({"url": "https://host/fovea.whl"}, "pip install 'fovea-rl[hub]'"),
        ({"url": "file:///my%20code/fovea", "dir_info": {}}, "pip install '/my code/fovea[hub]'"),
        ({"url": "file:///src/fovea", "dir_info": {"editable": True}}, "pip install -e '/src/fovea[hub]'"),
    ],
)
def test_an_extra_comes_from_where_fovea_came_from(
    origin: dict[str, object] | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "distribution", lambda _name: Installed(origin))
    assert pip_install("hub") == command
