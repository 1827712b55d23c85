"""The examples of docs/agents.md, tried as a new user would: an environment of gymnasium, and an MCP server."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from fovea.config.loading import load_config
from fovea.environments.adapters.mcp import McpConnection
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.types import ImageRef
from fovea.wiring.run import build

PAGE = (Path(__file__).parents[1] / "docs" / "agents.md").read_text(encoding="utf-8")
QUIET = ["log.tensorboard=false", "log.progress=false", "evaluate.image_controls=false", "model.device=cpu"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for text in re.findall(r"```(?:python|yaml)\n(# (\S+)\n.*?)```", PAGE, re.DOTALL):
        (tmp_path / text[1]).write_text(text[0])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_run_plays_the_environment_of_gymnasium(folder: Path) -> None:
    run = build(load_config([folder / "strip.yaml"], QUIET))
    summary = train(run)
    steps = read_metrics(folder / "runs" / "strip")
    assert summary.steps == steps[-1]["step"] == 2
    assert {each["episodes/failed"] for each in steps if "episodes/failed" in each} == {0}
    # a tiny model with random weights names no action, so that its episodes are as long as they may be
    assert summary.final is not None
    assert summary.final.parts == {"invalid_actions": (3.0,) * 8}


def test_the_server_of_the_page_gives_its_tool(folder: Path) -> None:
    (code,) = re.findall(r"```python\n(import sys\n.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    connection, tools = names["squares"], names["tools"]
    assert isinstance(connection, McpConnection)
    assert isinstance(tools, tuple)
    (square,) = tools
    (picture,) = asyncio.run(square.call({"colour": "red"}, ()))
    connection.close()
    assert isinstance(picture, ImageRef)
    assert picture.source == (folder / "square.png").read_bytes()
