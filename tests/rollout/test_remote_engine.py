"""An engine in a process of another Python environment: calls, weights and errors cross, and no process is left."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fovea.config.backends import VllmSettings
from fovea.config.loading import load_config
from fovea.errors import EngineError, LostEngineError
from fovea.models.processor import load_processor
from fovea.processes.engine_process import EngineProcess, Limits
from fovea.rollout.remote_engine import RemoteEngine
from fovea.types import Completion
from fovea.wiring.engine import NO_LIMITS, make_streamed
from fovea_gym.errors import ConfigError
from fovea_gym.utils.event_loop import wait_for
from tests.process_groups import members
from tests.rollout.engine_suite import ask, prompts_of
from tests.rollout.fake_engine_host import AFTER, CLOSED, DEADLY, ENVIRONMENT, FOR_EVER, KEPT, STRANGE
from tests.tiny_models import save, tiny

pytestmark = pytest.mark.kill

HOST = [sys.executable, "-m", "tests.rollout.fake_engine_host"]
REQUEST = ask("request", prompts_of(tiny("qwen3_vl"))[2])
"""With three images."""


@pytest.fixture(scope="module")
def engine() -> Iterator[RemoteEngine]:
    made = RemoteEngine("fake", EngineProcess("the fake engine", HOST, {}, NO_LIMITS))
    yield made
    wait_for(made.close())


def sync(engine: RemoteEngine, version: int, *tensors: torch.Tensor) -> None:
    engine.begin_sync({f"weight{number}": tuple(tensor.shape) for number, tensor in enumerate(tensors)})
    engine.receive_weights([(f"weight{number}", tensor) for number, tensor in enumerate(tensors)])
    engine.finish_sync(version)


def sampled(engine: RemoteEngine) -> Completion:
    return wait_for(engine.generate(REQUEST))[0]


def test_weights_arrive_and_stay_the_trainers(engine: RemoteEngine) -> None:
    assert not engine.has_weights
    sums = []
    for version in (1, 2):
        tensors = [torch.full((3, 2), float(version)), torch.arange(4, dtype=torch.bfloat16) + version]
        sync(engine, version, *tensors)
        assert not any(tensor.is_shared() for tensor in tensors), "moved into shared memory, for good"
        completion = sampled(engine)
        sums.append(completion.logprobs_T.tolist())
        assert completion.version == version
    assert engine.has_weights
    assert sums == [[6.0, 10.0], [12.0, 14.0]]


def test_errors_are_those_of_the_engine(engine: RemoteEngine) -> None:
    with pytest.raises(EngineError, match=r"^no such weight$"):
        engine.begin_sync({"unknown": (1,)})
    with pytest.raises(EngineError, match="nowhere"):
        wait_for(engine.generate(replace(REQUEST, id=STRANGE)))


def test_a_weight_sync_waits_for_the_end_of_a_request_that_was_given_up(engine: RemoteEngine) -> None:
    async def give_up() -> None:
        drawing = asyncio.ensure_future(engine.generate(replace(REQUEST, id=FOR_EVER)))
        await asyncio.sleep(0.1)
        with pytest.raises(EngineError, match="new weights"):
            engine.begin_sync({})
        drawing.cancel()
        with suppress(asyncio.CancelledError):
            await drawing

    wait_for(give_up())
    sync(engine, 3, torch.ones(1))
    assert sampled(engine).version == 3
    # nor is it asked to sleep before
    wait_for(give_up())
    wait_for(engine.sleep())
    wait_for(engine.wake())


def test_a_request_that_is_aborted_ends_with_an_error(engine: RemoteEngine) -> None:
    """Whoever gave it up waits for it no longer, but its end is a call that has been answered."""
    drawing = engine.process.call("generate", replace(REQUEST, id=FOR_EVER))
    engine.process.run("abort", FOR_EVER)
    with pytest.raises(EngineError, match="aborted"):
        drawing.result(10)


def test_an_engine_sleeps_after_its_requests_and_until_it_is_woken(engine: RemoteEngine) -> None:
    async def told() -> None:
        drawing = asyncio.ensure_future(engine.generate(replace(REQUEST, id=f"{AFTER}1.0")))
        done, _ = await asyncio.wait([drawing], timeout=0.3)
        assert not done
        with pytest.raises(EngineError, match="sleep"):
            await engine.sleep()
        await drawing
        await engine.sleep()
        with pytest.raises(EngineError, match="asleep"):
            await engine.generate(REQUEST)
        await engine.wake()
        await engine.generate(REQUEST)

    wait_for(told())


def test_nothing_is_kept_of_a_request_that_has_ended(engine: RemoteEngine) -> None:
    """A run draws millions."""

    def kept() -> int:
        return int(wait_for(engine.generate(replace(REQUEST, id=KEPT)))[0].text)

    before = kept()
    for _ in range(10):
        sampled(engine)
    assert kept() <= before


def test_an_engine_that_dies_is_lost_with_its_last_words() -> None:
    dying = RemoteEngine("fake", EngineProcess("the fake engine", HOST, {}, NO_LIMITS))
    try:
        for _ in range(2):  # the second call finds it dead
            with pytest.raises(LostEngineError, match="the fake engine has ended: ValueError: last words; its log is "):
                wait_for(dying.generate(replace(REQUEST, id=DEADLY)))
    finally:
        wait_for(dying.close())
    assert not members(dying.process.pid), "the process that the engine had started"


def test_of_an_engine_that_was_closed_nothing_is_left(tmp_path: Path) -> None:
    """Nor does the engine leave its temporary files among others."""
    closed = tmp_path / "closed"
    process = EngineProcess("the fake engine", HOST, {CLOSED: str(closed)}, NO_LIMITS)
    engine, folder = RemoteEngine("fake", process), process.folder
    variables = json.loads(wait_for(engine.generate(replace(REQUEST, id=ENVIRONMENT)))[0].text)
    assert len(members(process.pid)) == 2
    started = time.monotonic()
    wait_for(engine.close())
    wait_for(engine.close())
    assert process.exit_code == 0, "it was killed"
    assert time.monotonic() - started < 10
    assert not members(process.pid)
    assert not folder.exists()
    assert closed.exists()
    assert variables["TMPDIR"] == str(folder)


def test_an_engine_that_does_not_start_in_time_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(LostEngineError, match=r"rollout\.engine\.start_seconds=0\.2 and was ended") as failed:
        EngineProcess(
            "slow",
            [sys.executable, "-c", "import time; time.sleep(600)"],
            {},
            Limits(start_seconds=0.2, timeout_seconds=600.0),
        )
    assert [str(path) for path in tmp_path.iterdir()] == [str(failed.value).rpartition(" ")[2]], "the log alone"


def test_an_engine_that_gives_no_answer_is_ended() -> None:
    """Not while it has nothing to do, nor while one of several answers comes in time."""
    process = EngineProcess("slow", HOST, {}, Limits(start_seconds=600.0, timeout_seconds=2.0))
    engine = RemoteEngine("fake", process)

    async def generate(*seconds: float) -> Sequence[Sequence[Completion]]:
        requests = [replace(REQUEST, id=f"{AFTER} {each}") for each in seconds]
        return await asyncio.gather(*map(engine.generate, requests))

    try:
        assert len(wait_for(generate(1, 2, 3))) == 3
        time.sleep(3)
        assert len(wait_for(generate(0))) == 1
        with pytest.raises(LostEngineError, match=r"rollout\.engine\.timeout_seconds=2 and was ended"):
            wait_for(generate(600))
    finally:
        wait_for(engine.close())


def test_an_environment_without_the_engine_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(tiny("qwen3_vl"), tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    given = [f"model.path={model}", "environment=shapes", "rollout.engine.name=vllm"]
    for python, message in (
        ("~/python", r"^rollout\.engine\.python=~/python: rollout\.engine=vllm .* is not installed"),
        ("nowhere/bin/python", r"^rollout\.engine\.python=nowhere/bin/python: no such interpreter; give the path"),
    ):
        config = load_config([], [*given, f"rollout.engine.python={python}"])
        settings = config.rollout.engine
        assert isinstance(settings, VllmSettings)
        with pytest.raises(ConfigError, match=message):
            make_streamed(config, settings, config.model, load_processor(config.model))


def test_both_environments_have_the_same_fovea(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fovea.wiring.engine.__version__", "0.0.1")
    config = load_config(
        [], [f"model.path={save(tiny('qwen3_vl'), tmp_path)}", "environment=shapes", "rollout.engine.name=vllm"]
    )
    settings = config.rollout.engine.model_copy(update={"python": sys.executable})
    with pytest.raises(ConfigError, match=r"it has Fovea .*, and the trainer 0\.0\.1; install that version"):
        make_streamed(config, settings, config.model, load_processor(config.model))  # type: ignore[arg-type]
