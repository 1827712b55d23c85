"""One engine on two schedulers in processes of their own, to both of which weights are sent, and which shard them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from fovea.utils.event_loop import wait_for
from tests.rollout.engine_suite import Served, check_draws_of_two_pushes
from tests.rollout.sglang.serving import push, start
from tests.tiny_models import tiny


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    parts = tiny("qwen3_vl", num_kv_heads=2)
    with pytest.MonkeyPatch.context() as patch:
        # SGLang binds every rank to cores of a CPU: more than one on this one only by name
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")
        engine = start(parts, tmp_path_factory.mktemp("sharded") / "model", tensor_parallel_size=2)
    try:
        yield Served(parts=parts, engine=engine, push=partial(push, engine, parts))
    finally:
        wait_for(engine.close())


def test_two_schedulers_draw_with_the_weights_of_the_last_push(served: Served) -> None:
    check_draws_of_two_pushes(served)
