"""vLLM in a separate process, as where the trainer's environment has none, in the suite of all engines."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from fovea.config.backends import VllmSettings
from fovea.config.loading import load_config
from fovea.rollout.remote_engine import RemoteEngine
from fovea.wiring.engine import make_streamed
from fovea_gym.utils.event_loop import wait_for
from tests.rollout.engine_suite import LIMIT_TOKENS, EngineSuite, Served
from tests.rollout.engines.on_vllm import ENGINE
from tests.rollout.engines.serving import served_by
from tests.tiny_models import save, tiny


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    parts = tiny("qwen3_vl")
    config = load_config(
        [],
        [
            f"model.path={save(parts, tmp_path_factory.mktemp('model'))}",
            "model.dtype=float32",
            "environment=shapes",
            "data.max_prompt_tokens=400",
            *ENGINE.run_settings,
            f"rollout.engine.max_model_len={LIMIT_TOKENS}",
            f"rollout.engine.python={sys.executable}",
        ],
    )
    assert isinstance(config.rollout.engine, VllmSettings)
    engine = make_streamed(config, config.rollout.engine, config.model, parts.processor)
    assert isinstance(engine, RemoteEngine)
    made = served_by(engine, parts)
    try:
        made.sync(7)
        yield made
    finally:
        wait_for(engine.close())


class TestInAnotherProcess(EngineSuite):
    pass
