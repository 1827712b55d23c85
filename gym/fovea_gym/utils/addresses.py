"""Checks of addresses, hub ids and folder names that the user has set, before they are used."""

from __future__ import annotations

import difflib
import ipaddress
import re
from pathlib import Path
from urllib.parse import SplitResult, urlsplit


def http_parts(url: str) -> SplitResult | None:
    """Split an http or https address; None for one that cannot be called, such as http://[::1 or http://10.0.0.256."""
    import httpx2  # noqa: PLC0415  importing it takes a tenth of a second, which most commands need not spend

    try:
        parts = urlsplit(url)
        httpx2.URL(url)
        # reading the port raises ValueError if it is not a number, or too large
        callable_ = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except (ValueError, httpx2.InvalidURL):
        return None
    return parts if callable_ else None


HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
CLOSE_ENOUGH = 0.7
"""Minimum similarity (difflib) for suggesting a name."""


def is_hub_id(text: str) -> bool:
    """True if a text can be an `org/name` on the hub; false for a path below an existing folder."""
    return HUB_ID.fullmatch(text) is not None and not Path(text).parent.exists()


def near_folder(path: Path) -> Path | None:
    """The folder with a name similar to the first part of `path` that does not exist; None if there is no such folder.

    If the whole path exists, it is returned.
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
    """True if a host name or address is a loopback address, which other machines cannot reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
