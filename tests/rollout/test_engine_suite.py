"""The embedded engine in the suite of all engines."""

from __future__ import annotations

import pytest

from fovea.models.trainable import merged_weights
from tests.rollout.drawing import make_engine
from tests.rollout.engine_suite import LIMIT_TOKENS, EngineSuite, Served
from tests.tiny_models import tiny


@pytest.fixture(params=["qwen2_5_vl", "qwen3_vl"])
def served(request: pytest.FixtureRequest) -> Served:
    parts = tiny(request.param)
    engine = make_engine(parts, LIMIT_TOKENS)

    def sync(version: int) -> None:
        engine.load_weights(dict(merged_weights(parts.network)), version)

    return Served(parts=parts, engine=engine, sync=sync)


class TestEmbedded(EngineSuite):
    pass
