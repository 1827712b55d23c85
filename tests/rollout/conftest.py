"""The engine of another package that this environment has: its tests are collected, marked, and may share an engine.

`make test-vllm` and `make test-sglang` name their engine by FOVEA_TEST_ENGINE: there none of its tests may skip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fovea.rollout import server_pool
from gym_tests.chat_server import Endpoint, endpoints
from tests.rollout.engines.under_test import ENGINES, NAME, serving, tiny_for

HERE = Path(__file__).parent
# not even imported without their engine: these modules import it
collect_ignore = [*({*ENGINES} - {NAME}), *([] if NAME else ["engines"])]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if NAME and any(item.path.is_relative_to(HERE / folder) for folder in ("engines", NAME)):
            item.add_marker(NAME)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Endpoint]]:
    """Starts HTTP endpoints, with which a pool of servers tries again at once."""
    monkeypatch.setattr(server_pool, "FIRST_PAUSE_SECONDS", 0.01)
    with endpoints() as start:
        yield start


# of a module, not of the session: vLLM in a process loses its groups when another engine of that process is closed
@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine of a tiny Qwen3-VL for all tests of a module that weight sync their own weights before they draw."""
    with serving(tiny_for("qwen3_vl", num_kv_heads=2), tmp_path_factory.mktemp("shared") / "model") as made:
        yield made.engine
