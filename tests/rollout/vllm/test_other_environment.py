"""vLLM in a process of its own, as where the trainer's environment has none, in the suite of all engines."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from fovea.build.engine import make_streamed
from fovea.cluster.engine_stream import EngineStream
from fovea.cluster.local import call_here
from fovea.cluster.streamed import StreamedWeights
from fovea.config.backends import VllmEngine
from fovea.config.loading import load_config
from fovea.models.outgoing import outgoing_merged
from fovea.rollout.remote_engine import RemoteEngine
from fovea.utils.event_loop import wait_for
from tests.rollout.engine_suite import LIMIT_TOKENS, EngineSuite, Served
from tests.rollout.vllm.serving import KV_CACHE_GIB
from tests.tiny_models import save, tiny


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    parts = tiny("qwen3_vl")
    settings = {
        "python": sys.executable,
        "kv_cache_gib": KV_CACHE_GIB,
        "enforce_eager": True,
        "max_model_len": LIMIT_TOKENS,
    }
    config = load_config(
        [],
        [
            f"model.path={save(parts, tmp_path_factory.mktemp('model'))}",
            "model.dtype=float32",
            "environment=shapes",
            "data.max_prompt_tokens=400",
            "rollout.engine.name=vllm",
            *(f"rollout.engine.{name}={value}" for name, value in settings.items()),
        ],
    )
    assert isinstance(config.rollout.engine, VllmEngine)
    engine = make_streamed(config, config.rollout.engine, config.model, parts.processor)
    assert isinstance(engine, RemoteEngine)
    sync = StreamedWeights(lambda: outgoing_merged(parts.network), torch.float32, [EngineStream(engine)], call_here)
    wait_for(sync.push(7))
    made = Served(parts=parts, engine=engine, push=lambda version: wait_for(sync.push(version)))
    try:
        yield made
    finally:
        wait_for(engine.close())


class TestInAnotherProcess(EngineSuite):
    pass
