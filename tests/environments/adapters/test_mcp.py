"""Tools of MCP servers in the settings of a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fovea.config.loading import load_config
from fovea.wiring.environment import make_environment
from fovea_gym.errors import ConfigError

SERVER = Path(__file__).parents[3] / "gym/gym_tests/adapters/mcp_server.py"


def test_settings_add_the_tools_of_servers() -> None:
    server = f"{{command: [{sys.executable}, {SERVER}], tools: [add, square]}}"
    settings = ["environment=shapes", "environment.tools=[calculator]", "model.path=tiny", "run_dir=runs/x"]
    config = load_config([], [*settings, f"environment.mcp={{squares: {server}}}"])
    made = make_environment(config)
    assert [tool.spec.name for tool in made.tools] == ["calculator", "add", "square"]
    twice = load_config([], [*settings, f"environment.mcp={{squares: {server}, more: {server}}}"])
    with pytest.raises(ConfigError, match=r"^environment\.mcp\.more\b.*\badd\b"):
        make_environment(twice)
