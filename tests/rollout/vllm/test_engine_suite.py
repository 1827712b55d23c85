"""vLLM in the suite of all engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rollout.engine_suite import Served, ServingSuite
from tests.rollout.vllm.serving import serving


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(request.param, tmp_path_factory.mktemp(request.param) / "model") as made:
        yield made


class TestVllm(ServingSuite):
    pass
