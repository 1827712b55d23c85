"""Telling paths of this machine from names on a hub, and what a mistyped path may mean."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
CLOSE_ENOUGH = 0.7
"""Likeness (difflib) from which on a name is suggested."""


def is_hub_id(text: str) -> bool:
    """Whether a text can be the `org/name` of a hub: a path below a folder of this machine is none."""
    return HUB_ID.fullmatch(text) is not None and not Path(text).parent.exists()


def near_folder(path: Path) -> Path | None:
    """The folder whose name is near that of the first part of `path` that does not exist; None where there is none.

    The path itself where all of it exists.
    """
    missing = next((part for part in (*reversed(path.parents), path) if not part.exists()), None)
    if missing is None:
        return path
    if not missing.parent.is_dir():
        return None
    beside = [each.name for each in missing.parent.iterdir() if each.is_dir()]
    near = difflib.get_close_matches(missing.name, beside, n=1, cutoff=CLOSE_ENOUGH)
    return missing.parent / near[0] if near else None
