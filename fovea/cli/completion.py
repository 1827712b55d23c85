"""What a shell completes in the words of a command; files are left to the shell itself."""

from __future__ import annotations

from fovea.config.describe import describe


def complete_setting(incomplete: str) -> list[str]:
    """The settings that a word may become, with their `=`."""
    return [f"{each.key}=" for each in describe() if each.key.startswith(incomplete)]
