"""The commands that install Fovea with an extra and the package of its tools, and what that package registers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fovea_gym.errors import ConfigError
from fovea_gym.utils import entry_points, installing

FOVEA, TOOLS = "fovea-rl", "fovea-rl-tools"
ROOT = Path(__file__).parents[2]


def pip_install(extra: str | None) -> str:
    """The command that installs Fovea as here, with an extra: `pip install -e '/src/fovea[ray]'` in a checkout."""
    return installing.pip_install(extra, FOVEA, ROOT)


def pip_install_elsewhere(extra: str | None) -> str:
    """The command for another environment, which may lack the gym as well."""
    return f"{installing.pip_install(None)} {pip_install(extra).removeprefix('pip install ')}"


def pip_install_tools() -> str:
    """The command that installs the package of the tools."""
    return installing.pip_install(None, TOOLS, ROOT / "tools")


def find_tool(group: str, name: str) -> Any:
    """The object that the tools register under this name; None where they are not installed."""
    return entry_points.load(group, name, [name], owner=TOOLS)


def load_tool(group: str, name: str, used_as: str) -> Any:
    """The same; ConfigError with the command that installs them. `used_as` is what a user has typed."""
    found = find_tool(group, name)
    if found is None:
        raise ConfigError(f"{used_as} comes with the package {TOOLS}, which is not installed: {pip_install_tools()}")
    return found
