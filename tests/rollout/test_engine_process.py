"""The process of an engine: what crosses to it, that no call waits for ever, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Timer
from types import MappingProxyType
from typing import Any

import psutil
import pytest
import torch

from fovea import __version__
from fovea.config.backends import VllmSettings
from fovea.config.loading import load_config
from fovea.errors import EngineError, LostEngineError
from fovea.models.processor import load_processor
from fovea.processes.engine_process import EngineProcess, Limits, NotStartedError
from fovea.processes.heartbeat import Silence
from fovea.rollout.remote_engine import RemoteEngine
from fovea.types import Completion, Request
from fovea.wiring.engine import NO_LIMITS, make_streamed
from fovea_gym.errors import ConfigError
from fovea_gym.processes.child import KEPT_LOGS
from fovea_gym.utils.event_loop import wait_for
from gym_tests.tables import table
from tests.process_groups import members
from tests.rollout.drawing import together
from tests.rollout.engine_suite import ask, prompts_of
from tests.rollout.fake_calls_host import BEGUN, LIMITS, Unreadable
from tests.rollout.fake_engine_host import AFTER, CLOSED, DEADLY, ENVIRONMENT, FOR_EVER, KEPT, STRANGE
from tests.tiny_models import save, tiny

pytestmark = pytest.mark.kill

SECONDS = 20.0
"""Longest wait for an end, of which the slowest takes three."""


def host(stage: str) -> list[str]:
    return [sys.executable, "-m", "tests.rollout.fake_calls_host", stage]


def start(stage: str = "serving", variables: Mapping[str, str | None] = MappingProxyType({})) -> EngineProcess:
    return EngineProcess("fake", host(stage), {}, Limits(**LIMITS), variables)


@pytest.fixture
def process() -> Iterator[EngineProcess]:
    with closing(start()) as made:
        yield made


def wait_until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


TRAINER = """
import os, sys, threading, time
from fovea.processes.engine_process import EngineProcess, Limits
def start():
    EngineProcess("fake", {command!r}, {{}}, Limits(**{limits!r}))
    time.sleep(600)
threading.Thread(target=start, daemon=True).start()
sys.stdin.readline()
if {held!r} and os.fork() == 0:
    time.sleep(600)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("held", [False, True], ids=["hung up", "pipe held by a fork of the trainer"])
@pytest.mark.parametrize("stage", ["importing", "starting", "serving"])
def test_all_of_it_ends_with_a_trainer_that_is_killed(stage: str, held: bool, tmp_path: Path) -> None:
    code = TRAINER.format(command=host(stage), limits=LIMITS, held=held)
    trainer = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    below: list[psutil.Process] = []
    try:
        wait_until(lambda: [log for log in tmp_path.glob("*/engine.log") if BEGUN in log.read_text()], "no start")
        (engine,) = [each for each in psutil.Process(trainer.pid).children() if stage in each.cmdline()]
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        assert trainer.stdout.readline() == "ready\n"
        below = psutil.Process(engine.pid).children(recursive=True)
        if stage != "importing":
            assert len(members(engine.pid)) == 2
        trainer.kill()
        trainer.wait()
        wait_until(lambda: all(map(is_gone, [engine, *below])), "processes are left, also those in separate groups")
        wait_until(lambda: not list(tmp_path.iterdir()), "its folder is left")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(trainer.pid, signal.SIGKILL)
        for each in below:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def test_an_engine_that_still_starts_is_ended_at_once_with_all_below_it() -> None:
    found, interrupted = list[psutil.Process](), list[float]()

    def below() -> list[psutil.Process]:
        started = [each for each in psutil.Process().children() if "starting" in each.cmdline()]
        return [*started, *(child for each in started for child in each.children(recursive=True))]

    def interrupt() -> None:
        wait_until(lambda: len(below()) == 3, "it does not start")
        found.extend(below())
        interrupted.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    Timer(0.1, interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        start("starting")
    assert time.monotonic() - interrupted[0] < 5
    assert len(found) == 3
    assert all(map(is_gone, found)), "one in a group of its own counts too"


def test_what_cannot_be_written_or_read_is_an_error_of_its_call_or_of_all_who_wait(process: EngineProcess) -> None:
    """A call that the process itself cannot read ends it."""
    with pytest.raises(EngineError, match="the result of unpicklable cannot be sent: TypeError: cannot pickle"):
        process.call("unpicklable").result(SECONDS)
    waiting = process.call("for_ever")
    for result in (process.call("unreadable"), waiting):
        with pytest.raises(EngineError, match=r"an answer of fake cannot be read: ModuleNotFoundError: .*nowhere_to"):
            result.result(SECONDS)
    assert process.call("echo", 3).result(SECONDS) == 3
    with pytest.raises(LostEngineError, match=r"fake has ended: ModuleNotFoundError: .*nowhere_to_be_found"):
        process.call("echo", Unreadable()).result(SECONDS)


def test_a_process_that_is_killed_is_lost_though_a_fork_of_it_holds_the_pipe(process: EngineProcess) -> None:
    for call in ("die_after_a_fork", "environment"):
        with pytest.raises(LostEngineError, match="fake has ended"):
            process.call(call).result(SECONDS)
    wait_until(lambda: not members(process.pid), "the fork is left")


PAUSED = """
import os, signal, sys, time
from fovea.errors import LostEngineError
from fovea.processes.engine_process import EngineProcess, Limits
process = EngineProcess("fake", {command!r}, {{}}, Limits(start_seconds=60, timeout_seconds=4))
waiting, began = process.call("for_ever"), time.monotonic()
print(process.pid, flush=True)
try:
    waiting.result()
except LostEngineError as error:
    print(time.monotonic() - began, error)
process.close()
"""


def test_silence_while_trainer_and_engine_were_stopped_says_nothing() -> None:
    """A container that is paused; an engine that stays silent afterwards is ended as ever."""
    code = PAUSED.format(command=host("serving"))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        both = (trainer.pid, int(trainer.stdout.readline()))
        for sent in (signal.SIGSTOP, signal.SIGCONT):
            for each in both:
                os.kill(each, sent)
            time.sleep(6 if sent is signal.SIGSTOP else 0)
        seconds, _, said = trainer.stdout.read().partition(" ")
    assert float(seconds) > 6 + 3
    assert said.startswith("fake gave no answer for rollout.engine.timeout_seconds=4 and was ended")
    Path(said.split()[-1]).unlink()


def test_a_call_after_a_long_time_without_any_is_not_taken_for_a_silent_one(
    process: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Future[int]] = []

    def before_a_call(silence: Silence, now: float) -> float:
        """A silence before a call, which begins once the silence was measured."""
        monkeypatch.undo()
        calls.append(process.call("echo", 3))
        return 2 * process.limits.timeout_seconds

    monkeypatch.setattr(Silence, "seconds", before_a_call)
    wait_until(lambda: calls, "no look")
    assert calls[0].result(SECONDS) == 3
    assert process.call("echo", 4).result(SECONDS) == 4, "it was not ended"


def test_variables_of_torchrun_are_not_those_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """With TORCHELASTIC_USE_AGENT_STORE the store of SGLang's process group is a client of itself."""
    leaking = ["RANK", "ROLE_NAME", "GROUP_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"]
    for name in leaking:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("REMOVED", "1")
    with closing(start(variables={"ADDED": "2", "REMOVED": None})) as process:
        variables = process.run("environment")
    assert not variables.keys() & {*leaking, "REMOVED"}
    assert variables["ADDED"] == "2"


def test_the_log_of_an_engine_in_a_process_of_another_engine_is_kept(
    process: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = process.run("lose_another")
    process.close()
    log = Path(said.rpartition(" ")[2])
    assert log.parent == Path(tempfile.gettempdir())
    assert "ValueError" in log.read_text()
    log.unlink()
    assert KEPT_LOGS not in os.environ


@table(
    ("code", "kind", "last_words"),
    [
        ("exit()", NotStartedError, "no output"),
        ("raise ValueError('no such model')", NotStartedError, "ValueError: no such model"),
        ("os.kill(0, 9)", LostEngineError, "no output"),
    ],
)
def test_a_process_that_ends_by_itself_before_it_is_ready_would_again(
    code: str, kind: type[LostEngineError], last_words: str
) -> None:
    with pytest.raises(LostEngineError, match=f"^fake has ended: {last_words}; its log is ") as failed:
        EngineProcess("fake", [sys.executable, "-c", f"import os; {code}"], {}, Limits(**LIMITS))
    assert type(failed.value) is kind


HOST = [sys.executable, "-m", "tests.rollout.fake_engine_host"]
REQUEST = ask("request", prompts_of(tiny("qwen3_vl"))[2])
"""With three images."""


@contextmanager
def remote(*, limits: Limits = NO_LIMITS, **sent: str) -> Iterator[RemoteEngine]:
    """An engine in a process of another environment."""
    made = RemoteEngine("fake", EngineProcess("the fake engine", HOST, sent, limits))
    try:
        yield made
    finally:
        wait_for(made.close())


@pytest.fixture(scope="module")
def engine() -> Iterator[RemoteEngine]:
    with remote() as made:
        yield made


def ask_for(name: object) -> Request:
    return replace(REQUEST, id=str(name))


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
        wait_for(engine.generate(ask_for(STRANGE)))


def test_a_weight_sync_waits_for_the_end_of_a_request_that_was_given_up(engine: RemoteEngine) -> None:
    async def give_up() -> None:
        drawing = asyncio.ensure_future(engine.generate(ask_for(FOR_EVER)))
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
    drawing = engine.process.call("generate", ask_for(FOR_EVER))
    engine.process.run("abort", FOR_EVER)
    with pytest.raises(EngineError, match="aborted"):
        drawing.result(10)


def test_an_engine_sleeps_after_its_requests_and_until_it_is_woken(engine: RemoteEngine) -> None:
    async def told() -> None:
        drawing = asyncio.ensure_future(engine.generate(ask_for(f"{AFTER}1.0")))
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
        return int(wait_for(engine.generate(ask_for(KEPT)))[0].text)

    before = kept()
    for _ in range(10):
        sampled(engine)
    assert kept() <= before


def test_an_engine_that_dies_is_lost_with_its_last_words() -> None:
    message = "the fake engine has ended: ValueError: last words; its log is "
    with remote() as dying:
        for _ in range(2):  # the second call finds it dead
            with pytest.raises(LostEngineError, match=message):
                wait_for(dying.generate(ask_for(DEADLY)))
    assert not members(dying.process.pid), "the process that the engine had started"


def test_of_an_engine_that_was_closed_nothing_is_left(tmp_path: Path) -> None:
    """Nor does the engine leave its temporary files among others."""
    closed = tmp_path / "closed"
    with remote(**{CLOSED: str(closed)}) as engine:
        process, folder = engine.process, engine.process.folder
        variables = json.loads(wait_for(engine.generate(ask_for(ENVIRONMENT)))[0].text)
        assert len(members(process.pid)) == 2
        started = time.monotonic()
        wait_for(engine.close())  # and once more at the end of the block
    assert process.exit_code == 0, "it was killed"
    assert time.monotonic() - started < 10
    assert not members(process.pid)
    assert not folder.exists()
    assert closed.exists()
    assert variables["TMPDIR"] == str(folder)


def test_an_engine_that_does_not_start_in_time_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sleeping = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(LostEngineError, match=r"rollout\.engine\.start_seconds=0\.2 and was ended") as failed:
        EngineProcess("slow", sleeping, {}, Limits(start_seconds=0.2, timeout_seconds=600.0))
    assert [str(path) for path in tmp_path.iterdir()] == [str(failed.value).rpartition(" ")[2]], "the log alone"


def test_an_engine_that_gives_no_answer_is_ended() -> None:
    """Not while it has nothing to do, nor while one of several answers comes in time."""
    with remote(limits=Limits(start_seconds=600.0, timeout_seconds=2.0)) as engine:
        assert len(together(engine, [ask_for(f"{AFTER} {seconds}") for seconds in (1, 2, 3)])) == 3
        time.sleep(3)
        assert len(together(engine, [ask_for(f"{AFTER} 0")])) == 1
        with pytest.raises(LostEngineError, match=r"rollout\.engine\.timeout_seconds=2 and was ended"):
            wait_for(engine.generate(ask_for(f"{AFTER} 600")))


@table(
    ("python", "version", "message"),
    [
        ("~/python", __version__, r"^rollout\.engine\.python=~/python: rollout\.engine=vllm .* is not installed"),
        ("no/python", __version__, r"^rollout\.engine\.python=no/python: no such interpreter; give the path"),
        (sys.executable, "0.0.1", r"it has Fovea .*, and the trainer 0\.0\.1; install that version"),
    ],
)
def test_an_environment_without_the_engine_or_with_another_fovea_is_named(
    python: str, version: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save(tiny("qwen3_vl"), tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("fovea.wiring.engine.__version__", version)
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    engine = ["rollout.engine.name=vllm", f"rollout.engine.python={python}"]
    config = load_config([], [f"model.path={model}", "environment=shapes", *engine])
    assert isinstance(config.rollout.engine, VllmSettings)
    with pytest.raises(ConfigError, match=message):
        make_streamed(config, config.rollout.engine, config.model, load_processor(config.model))
