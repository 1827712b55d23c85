"""SGLang's processes: one that dies or hangs is a lost engine, and of a closed one nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any, cast

import psutil
import pytest

from fovea.cluster.services import WorkersEngine
from fovea.cluster.workers import LocalHandle, Worker, Workers
from fovea.errors import ConfigError, LostEngineError
from fovea.rollout.base import Engine
from fovea.rollout.engine_process import Limits
from fovea.rollout.sglang.engine import CACHE, SglangEngine
from fovea.types import Completion
from fovea.utils.event_loop import wait_for
from tests.process_groups import members
from tests.rollout.engine_suite import ask, equal, prompts_of
from tests.rollout.sglang.serving import push, start
from tests.tiny_models import tiny


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SglangEngine]]:
    """Two engines with the same weights."""
    parts = tiny("qwen3_vl")
    folders = [tmp_path_factory.mktemp("engine") / "model" for _ in range(2)]
    with ThreadPoolExecutor() as threads:
        started = list(threads.map(partial(start, parts), folders))
    try:
        for engine in started:
            push(engine, parts, 1)
        yield started
    finally:
        for engine in started:
            wait_for(engine.close())


def scheduler_of(engine: SglangEngine) -> psutil.Process:
    return next(each for each in members(engine.process.pid) if "scheduler" in " ".join(each.cmdline()))


def check_gone(engine: SglangEngine) -> None:
    """That nothing is left of a closed engine."""
    assert not members(engine.process.pid)
    assert not Path(engine.process._folder.name).exists()


def test_a_call_longer_than_the_pipe_arrives_whole(engines: list[SglangEngine]) -> None:
    """The host begins to read it while the rest of it is still to be written."""
    assert engines[0].process.call("abort", "of no request" * 2_000_000).result(60) is None


def test_memory_is_freed_when_the_scheduler_is_done_with_all_requests(engines: list[SglangEngine]) -> None:
    """It tells of an end before it has put the request away; asked for memory in between, SGLang ends itself."""
    engine, prompt = engines[0], prompts_of(tiny("qwen3_vl"))[0]
    drawings = engine._translator.drawings(ask("long", prompt, max_new_tokens=900))
    drawing = engine.process.call("generate", "long", drawings)
    sleep(2)
    freed = engine.process.call("release", [CACHE])
    engine.process.run("abort", "long")
    assert 0 < len(drawing.result(60).completions[0].token_ids) < 900
    freed.result(60)
    engine.process.run("restore", [CACHE])
    assert wait_for(engine.generate(ask("next", prompt)))


def test_requests_of_an_engine_that_is_killed_are_made_again_on_another(engines: list[SglangEngine]) -> None:
    """None is lost, none doubled, and the completions are the same."""
    killed, other = engines
    assert len(members(killed.process.pid)) >= 3, "host, scheduler, detokenizer"
    assert Path(killed.process._folder.name).is_dir()
    prompts = prompts_of(tiny("qwen3_vl"))
    requests = [ask(f"r{i}", prompts[i % 3], n=2, seed=i, max_new_tokens=4 if i < 2 else 150) for i in range(12)]
    workers = Workers([], [LocalHandle(cast(Any, Worker)(policy=None, engine=e, weight_sync=None)) for e in engines])
    both = WorkersEngine(workers, "sglang")

    async def draw(engine: Engine, interrupt: bool) -> list[Sequence[Completion]]:
        tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
        if interrupt:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            scheduler_of(killed).kill()
        return await asyncio.wait_for(asyncio.gather(*tasks), timeout=300)

    expected = wait_for(draw(other, False))
    found = wait_for(draw(both, True))
    assert [c.id for group in found for c in group] == [f"r{i}/{n}" for i in range(12) for n in range(2)]
    assert all(equal(a, b) for a, b in zip(found, expected, strict=True))
    assert workers.requests_reissued() > 0
    assert len(workers.engines) == 1
    with pytest.raises(LostEngineError, match=r"SGLang has ended: .*; its log is ") as lost:
        wait_for(killed.generate(ask("after", prompts[0])))
    log = Path(str(lost.value).rpartition(" ")[2])
    assert log.stat().st_size > 0
    wait_for(killed.close())
    check_gone(killed)


def test_an_engine_that_hangs_is_an_error_that_names_the_setting(
    engines: list[SglangEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test of these engines."""
    engine = engines[1]
    monkeypatch.setattr(engine.process, "_limits", Limits(start_seconds=1.0, timeout_seconds=2.0))
    scheduler_of(engine).suspend()
    with pytest.raises(LostEngineError, match=r"gave no answer for rollout\.engine\.timeout_seconds=2 and was ended"):
        wait_for(engine.generate(ask("hung", prompts_of(tiny("qwen3_vl"))[0])))
    wait_for(engine.close())
    check_gone(engine)


def test_an_engine_that_does_not_start_in_time_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"rollout.engine=sglang does not start: .*rollout\.engine\.start_seconds=0.1"
    ):
        start(tiny("qwen3_vl"), tmp_path / "model", start_seconds=0.1)
