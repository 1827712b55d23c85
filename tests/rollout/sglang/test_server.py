"""`fovea serve` with SGLang's real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rollout.serve_command import Serving
from tests.rollout.server_suite import ServerSuite, serving_shapes, short_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return short_run(tmp_path_factory.mktemp("served") / "run")


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[Serving]:
    with serving_shapes(run, "sglang") as started:
        yield started


class TestSglangServer(ServerSuite):
    pass
