"""An engine in a process of another Python environment: calls, weights and errors cross, and no process is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from fovea.build.engine import make_streamed
from fovea.build.other_environment import NO_LIMITS
from fovea.config.backends import VllmEngine
from fovea.config.loading import load_config
from fovea.errors import ConfigError, EngineError, LostEngineError
from fovea.models.processor import load_processor
from fovea.rollout.engine_process import EngineProcess
from fovea.rollout.remote_engine import RemoteEngine
from fovea.types import Completion
from fovea.utils.event_loop import wait_for
from tests.rollout.engine_suite import ask, prompts_of
from tests.rollout.fake_engine_host import DEADLY, FOR_EVER, STRANGE
from tests.tiny_models import save, tiny

HOST = [sys.executable, "-m", "tests.rollout.fake_engine_host"]
REQUEST = ask("request", prompts_of(tiny("qwen3_vl"))[2])
"""With three images."""


@pytest.fixture(scope="module")
def engine() -> Iterator[RemoteEngine]:
    made = RemoteEngine("fake", EngineProcess("the fake engine", HOST, {}, NO_LIMITS))
    yield made
    wait_for(made.close())


def push(engine: RemoteEngine, version: int, *tensors: torch.Tensor) -> None:
    engine.begin_push({f"weight{number}": tuple(tensor.shape) for number, tensor in enumerate(tensors)})
    engine.take_weights([(f"weight{number}", tensor) for number, tensor in enumerate(tensors)])
    engine.finish_push(version)


def drawn(engine: RemoteEngine) -> Completion:
    return wait_for(engine.generate(REQUEST))[0]


def test_weights_arrive_and_stay_the_trainers(engine: RemoteEngine) -> None:
    assert not engine.has_weights
    sums = []
    for version in (1, 2):
        tensors = [torch.full((3, 2), float(version)), torch.arange(4, dtype=torch.bfloat16) + version]
        push(engine, version, *tensors)
        assert not any(tensor.is_shared() for tensor in tensors), "moved into shared memory, for good"
        completion = drawn(engine)
        sums.append(completion.logprobs_T.tolist())
        assert completion.version == version
    assert engine.has_weights
    assert sums == [[6.0, 10.0], [12.0, 14.0]]


def test_errors_are_those_of_the_engine(engine: RemoteEngine) -> None:
    with pytest.raises(EngineError, match=r"^no such weight$"):
        engine.begin_push({"unknown": (1,)})
    with pytest.raises(EngineError, match="nowhere"):
        wait_for(engine.generate(replace(REQUEST, id=STRANGE)))


def test_a_push_waits_for_the_end_of_a_request_that_was_given_up(engine: RemoteEngine) -> None:
    async def give_up() -> None:
        drawing = asyncio.ensure_future(engine.generate(replace(REQUEST, id=FOR_EVER)))
        await asyncio.sleep(0.1)
        with pytest.raises(EngineError, match="new weights came while"):
            engine.begin_push({})
        drawing.cancel()
        with suppress(asyncio.CancelledError):
            await drawing

    wait_for(give_up())
    push(engine, 3, torch.ones(1))
    assert drawn(engine).version == 3


def test_an_engine_that_dies_is_lost_with_its_last_words() -> None:
    dying = RemoteEngine("fake", EngineProcess("the fake engine", HOST, {}, NO_LIMITS))
    try:
        with pytest.raises(LostEngineError, match="the fake engine has ended: ValueError: last words; its log is "):
            wait_for(dying.generate(replace(REQUEST, id=DEADLY)))
    finally:
        wait_for(dying.close())


def test_it_ends_with_a_trainer_that_is_killed(tmp_path: Path) -> None:
    code = f"""
from fovea.build.other_environment import NO_LIMITS
from fovea.rollout.engine_process import EngineProcess
import time
print(EngineProcess("fake", {HOST!r}, {{}}, NO_LIMITS).pid, flush=True)
time.sleep(600)
"""
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    host = psutil.Process(int(trainer.stdout.readline()))
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.communicate()
    deadline = time.monotonic() + 20
    while host.is_running() and host.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(0.1)


def test_an_environment_without_the_engine_is_named(tmp_path: Path) -> None:
    model = save(tiny("qwen3_vl"), tmp_path)
    given = [f"model.path={model}", "environment=shapes", "rollout.engine.name=vllm"]
    for python, message in (
        (sys.executable, rf"^rollout\.engine\.python={sys.executable}: rollout\.engine=vllm .* is not installed"),
        ("nowhere/bin/python", r"^rollout\.engine\.python=nowhere/bin/python: no such interpreter; name that of"),
    ):
        config = load_config([], [*given, f"rollout.engine.python={python}"])
        settings = config.rollout.engine
        assert isinstance(settings, VllmEngine)
        with pytest.raises(ConfigError, match=message):
            make_streamed(config, settings, config.model, load_processor(config.model))


def test_both_environments_have_the_same_fovea(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fovea.build.other_environment.__version__", "0.0.1")
    config = load_config(
        [], [f"model.path={save(tiny('qwen3_vl'), tmp_path)}", "environment=shapes", "rollout.engine.name=vllm"]
    )
    settings = config.rollout.engine.model_copy(update={"python": sys.executable})
    with pytest.raises(ConfigError, match=r"it has Fovea .*, and the trainer 0\.0\.1; install that one"):
        make_streamed(config, settings, config.model, load_processor(config.model))  # type: ignore[arg-type]
