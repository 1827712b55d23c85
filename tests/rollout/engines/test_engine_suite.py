"""The engine in the suite of all engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.rollout.engine_suite import Served, ServingSuite
from tests.rollout.engines.serving import served_by, serving, tiny_for


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def served(request: pytest.FixtureRequest, shared: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with ExitStack() as stack:
        if request.param == "qwen3_vl":
            made = served_by(shared, tiny_for("qwen3_vl", num_kv_heads=2))
        else:
            made = stack.enter_context(serving(tiny_for(request.param), tmp_path_factory.mktemp("suite") / "model"))
        made.push(7)
        yield made


class TestEngine(ServingSuite):
    pass
