"""One engine on two workers in processes of their own, to which weights are copied and in which they are sharded."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from fovea.errors import LostEngineError
from fovea.rollout.vllm.engine import VllmEngine
from fovea.utils.event_loop import wait_for
from tests.rollout.engine_suite import Served, ask, check_draws_of_two_pushes, prompts_of
from tests.rollout.vllm.serving import push, start
from tests.tiny_models import tiny


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    parts = tiny("qwen3_vl", num_kv_heads=2)
    engine = start(parts, tmp_path_factory.mktemp("sharded") / "model", tensor_parallel_size=2)
    try:
        yield Served(parts=parts, engine=engine, push=lambda version: push(engine, parts, version))
    finally:
        wait_for(engine.close())


def test_two_workers_draw_with_the_weights_of_the_last_push(served: Served) -> None:
    check_draws_of_two_pushes(served)


def test_a_worker_that_is_killed_is_a_lost_engine(served: Served) -> None:
    """Whose requests another engine may take, or the run after its restart; the last test of this engine."""
    engine = served.engine
    assert isinstance(engine, VllmEngine)
    worker = engine.llm.engine_core.engine_core.model_executor.workers[1].proc.pid

    async def kill_in_the_middle() -> None:
        drawing = asyncio.ensure_future(engine.generate(ask("killed", prompts_of(served.parts)[0], max_new_tokens=900)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not drawing.done()
        os.kill(worker, signal.SIGKILL)
        await drawing

    with pytest.raises(LostEngineError, match="a worker process of vLLM has ended"):
        wait_for(kill_in_the_middle())
    with pytest.raises(LostEngineError, match="a worker process of vLLM has ended"):
        served.push(3)
