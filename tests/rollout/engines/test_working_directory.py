"""Processes of an engine import nothing from the working directory, where a stranger's files may lie."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

import pytest

from fovea.rollout.server import ModelServer
from tests.rollout.engines.under_test import NAME
from tests.tiny_models import save, tiny

SAID = "a file of the working directory"
STRANGER = f"raise SystemExit({SAID!r})"
Start: TypeAlias = Callable[[Path], tuple[Sequence[str], Mapping[str, str]]]


def server(folder: Path) -> tuple[Sequence[str], Mapping[str, str]]:
    launch = import_module(f"fovea.rollout.{NAME}.server").launch(
        ModelServer(folder=save(tiny("qwen3_vl"), folder), name="served", host="127.0.0.1", port=1)
    )
    return launch.command, launch.environment


def host(_: Path) -> tuple[Sequence[str], Mapping[str, str]]:
    return import_module(f"fovea.rollout.{NAME}.arguments").HOST, os.environ


def printed(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize("started", [server] if NAME == "vllm" else [server, host])
def test_a_package_in_the_working_directory_is_not_imported(started: Start, tmp_path: Path) -> None:
    command, environment = started(tmp_path / "model")
    for name in (str(NAME), "fovea"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(STRANGER)
    until_module = [*command[: command.index("-m") + 2], "--help"]
    output = printed(until_module, environment, tmp_path)
    assert output
    assert SAID not in output
    assert SAID in printed([each for each in until_module if each != "-P"], environment, tmp_path)
