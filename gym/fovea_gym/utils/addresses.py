"""True if an address of the user's can be called, told before anything calls it."""

from __future__ import annotations

import difflib
import ipaddress
import re
from pathlib import Path
from urllib.parse import SplitResult, urlsplit


def http_parts(url: str) -> SplitResult | None:
    """Split an http or https address; None for one that cannot be called, such as http://[::1 or http://10.0.0.256."""
    import httpx2  # noqa: PLC0415  takes a tenth of a second, which commands without an address are spared

    try:
        parts = urlsplit(url)
        httpx2.URL(url)
        # reading the port raises for one that is not a number or too large
        callable_ = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except (ValueError, httpx2.InvalidURL):
        return None
    return parts if callable_ else None


HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
CLOSE_ENOUGH = 0.7
"""Likeness (difflib) from which on a name is suggested."""


def is_hub_id(text: str) -> bool:
    """True if a text can be the `org/name` of a hub: a path below a folder of this machine is none."""
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


def is_loopback(host: str) -> bool:
    """True if a host name or address is one that other machines do not reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
