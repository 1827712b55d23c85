"""The command that installs Fovea with an extra."""

from __future__ import annotations

from pathlib import Path

from fovea_gym.utils import installing

FOVEA, TOOLS = "fovea-rl", "fovea-rl-tools"
ROOT = Path(__file__).parents[2]


def pip_install(extra: str | None) -> str:
    """The command that installs Fovea as here, with an extra: `pip install -e '/src/fovea[ray]'` in a checkout."""
    return installing.pip_install(extra, FOVEA, ROOT)


def pip_install_tools() -> str:
    """The command that installs the package of commands that a run never needs."""
    return installing.pip_install(None, TOOLS, ROOT / "tools")
