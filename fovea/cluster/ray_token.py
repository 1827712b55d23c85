"""The secret token of a Ray cluster: whoever has it may run code on every node, so Ray asks each process for it."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

PATH_VARIABLE = "RAY_AUTH_TOKEN_PATH"


def token_path() -> Path:
    """Path at which Ray looks for this user's token."""
    return Path(os.environ.get(PATH_VARIABLE) or Path.home() / ".ray" / "auth_token")


def has_token() -> bool:
    """True if Ray will find a token, in a file or in the environment."""
    return bool(os.environ.get("RAY_AUTH_TOKEN")) or token_path().is_file()


def make_token() -> None:
    """Write a new token unless one exists."""
    if has_token():
        return
    path = token_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # readable only by this user from the start; Ray would leave the mode to the umask
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))


def use_token() -> None:
    """Turn on Ray's authentication unless the environment says otherwise; call it before ray is imported."""
    if "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    # Ray would send usage statistics to its developers
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
