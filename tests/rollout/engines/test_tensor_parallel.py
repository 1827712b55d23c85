"""One engine on two workers in their own processes, to both of which weights are sent, and which shard them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

from fovea.cluster.services import WorkersEngine
from fovea.cluster.workers import LocalHandle, Worker, Workers
from fovea.errors import LostEngineError
from fovea.rollout.base import Engine
from fovea.types import Completion
from fovea_gym.utils.event_loop import wait_for
from tests.rollout.engine_suite import Served, ask, check_samples_of_two_syncs, equal, prompts_of
from tests.rollout.engines.under_test import serving, sync, tiny_for, under_test


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = tiny_for("qwen3_vl", num_kv_heads=2)
    with serving(model, tmp_path_factory.mktemp("sharded") / "model", tensor_parallel_size=2) as made:
        yield made


def test_two_workers_draw_with_the_weights_of_the_last_weight_sync(served: Served) -> None:
    check_samples_of_two_syncs(served)


def test_requests_of_an_engine_with_a_killed_worker_are_made_again_on_another(served: Served, shared: Any) -> None:
    """None is lost, none doubled, and the completions are the same. The last test of this engine."""
    killed = served.engine
    served.sync(3)
    sync(shared, served.parts, 3)
    prompts = prompts_of(served.parts)
    requests = [ask(f"r{i}", prompts[i % 3], n=2, seed=i, max_new_tokens=4 if i < 2 else 150) for i in range(12)]
    handles = [LocalHandle(cast(Any, Worker)(policy=None, engine=e, weight_sync=None)) for e in (killed, shared)]
    workers = Workers([], handles)

    async def draw(engine: Engine, interrupt: bool) -> list[Sequence[Completion]]:
        tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
        if interrupt:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            under_test().workers(killed)[1].kill()
        return await asyncio.gather(*tasks)

    expected = wait_for(draw(shared, False))
    found = wait_for(draw(WorkersEngine(workers, "both"), True))
    assert [c.id for group in found for c in group] == [f"r{i}/{n}" for i in range(12) for n in range(2)]
    assert all(equal(a, b) for a, b in zip(found, expected, strict=True))
    assert workers.requests_reissued() > 0
    assert len(workers.engines) == 1
    with pytest.raises(LostEngineError, match=under_test().lost):
        wait_for(killed.generate(ask("after", prompts[0])))
    with pytest.raises(LostEngineError, match=under_test().lost):
        served.sync(4)
