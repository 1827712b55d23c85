"""Whether an address of the user's can be called, told before anything calls it."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit


def http_parts(url: str) -> SplitResult | None:
    """Split an http or https address; None for one that cannot be called, such as http://[::1 or http://10.0.0.256."""
    import httpx2  # noqa: PLC0415  takes a tenth of a second, which commands without an address are spared

    try:
        parts = urlsplit(url)
        httpx2.URL(url)
        # reading the port raises for one that is no number or too large
        callable_ = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except (ValueError, httpx2.InvalidURL):
        return None
    return parts if callable_ else None
