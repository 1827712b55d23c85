"""`benchmarks.names`: what a release lacks of the names and arguments that code uses is told."""

from __future__ import annotations

import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.names import Source, main, missing, uses_of

RELEASE = {
    "engine/__init__.py": "from engine.core import Engine\n_LAZY = ['Late']\n",
    "engine/core.py": (
        "from dataclasses import dataclass\n"
        "class Engine:\n    def __init__(self, model, *, seed=0): ...\n"
        "@dataclass\nclass Settings:\n    model: str\n    seed: int = 0\n"
        "class Open(Settings): ...\n"
        "def start(model, **rest): ...\n"
        "def stop(wait=True): ...\n"
    ),
    "engine/tools/__init__.py": "",
    "engine/tools/free.py": "FREE = 1\n",
}
USER = """
from engine import Engine, Late, tools
from engine.core import Engine as Core, Open, Settings, start, stop, gone
from engine.tools.free import FREE
from engine.nowhere import x

Core(model=1, sed=2)
Engine(seed=1)
Settings(model=1, size=2)
Open(anything=1)
start(1, anything=2)
stop(wait=False, hard=True)
"""
LACKING = {
    "engine.core.Engine takes no sed",
    "engine.core.Settings takes no size",
    "engine.core.stop takes no hard",
    "no name gone in engine.core",
    "no module engine.nowhere",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in RELEASE.items():
        file = tmp_path / "release" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "user.py").write_text(USER)
    return tmp_path


@pytest.fixture(params=["folder", "wheel"])
def release(folder: Path, request: pytest.FixtureRequest) -> Source:
    if request.param == "folder":
        return folder / "release"
    wheel = folder / "engine-1.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for name, text in RELEASE.items():
            file.writestr(name, text)
    return zipfile.Path(wheel)


def test_what_a_release_lacks_is_found(folder: Path, release: Source) -> None:
    found = {said for use in uses_of("engine", folder / "code") if (said := missing(use, release)) is not None}
    assert found == LACKING


def test_every_name_that_fovea_takes_of_torch_is_in_the_installed_one(capsys: pytest.CaptureFixture[str]) -> None:
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    assert main(["torch", str(Path(spec.origin).parents[1])]) == 0, capsys.readouterr().out
