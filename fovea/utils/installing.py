"""Commands that install Fovea with an extra or its tools package, and access to what the tools register."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fovea_gym.errors import ConfigError
from fovea_gym.utils import entry_points, installing

FOVEA, TOOLS = "fovea-rl", "fovea-rl-tools"
ROOT = Path(__file__).parents[2]


def pip_install(extra: str | None) -> str:
    """The command that installs this Fovea with an extra; in a checkout, `pip install -e '/src/fovea[ray]'`."""
    return installing.pip_install(extra, FOVEA, ROOT)


def pip_install_elsewhere(extra: str | None) -> str:
    """The command for another environment, in which the gym may be missing as well."""
    return f"{installing.pip_install(None)} {pip_install(extra).removeprefix('pip install ')}"


def pip_install_tools() -> str:
    """The command that installs the package of the tools."""
    return installing.pip_install(None, TOOLS, ROOT / "tools")


def find_tool(group: str, name: str) -> Any:
    """The object that the tools register under this name; None if they are not installed."""
    return entry_points.load(group, name, [name], owner=TOOLS)


def load_tool(group: str, name: str, used_as: str) -> Any:
    """As `find_tool`, but ConfigError with the install command if tools are missing; `used_as` is the user's input."""
    found = find_tool(group, name)
    if found is None:
        raise ConfigError(f"{used_as} comes with the package {TOOLS}, which is not installed: {pip_install_tools()}")
    return found
