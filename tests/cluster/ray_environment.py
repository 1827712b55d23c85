"""The environment of runs on Ray that no cluster of this machine's user is in the way of."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fovea.cluster.ray_token import make_token
from tests.runs import environment


@contextmanager
def own_ray() -> Iterator[dict[str, str]]:
    """Environment variables by which Ray has folders and a token of its own, for the block."""
    # not pytest's folder: the names of Ray's sockets are limited to 107 characters
    with tempfile.TemporaryDirectory(prefix="fv") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN_PATH", f"{folder}/token")
        make_token()
        own = {"RAY_TMPDIR": folder, "RAY_AUTH_TOKEN_PATH": f"{folder}/token", "RAY_AUTH_MODE": "token"}
        yield {**environment(), **own}
