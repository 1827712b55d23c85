"""Rewards in processes (`reward_in=process`): scored as in threads, killed where they are late, gone with the run."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock

import psutil
import pytest
from PIL import Image

import fovea
from fovea.config.loading import load_config
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.wiring.run import build
from fovea_gym.environments.custom.loading import import_file
from fovea_gym.errors import ConfigError, ScoreError, UnscoredError
from fovea_gym.graders.grading import Grading
from fovea_gym.types import Task, Turn
from fovea_gym.utils.event_loop import wait_for
from gym_tests.grading import score_in_run
from tests.environments.custom.process_rewards import REWARDS, TASK, graded
from tests.runs import ROOT, arguments, environment, until_killed


def is_gone(pid: float) -> bool:
    try:
        return psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(pid: float, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not is_gone(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


@pytest.mark.parametrize("function", ["whole", "later"])
def test_a_score_from_a_process_is_that_of_a_thread(function: str, tmp_path: Path) -> None:
    with graded(tmp_path, function) as in_process, graded(tmp_path, function, reward_in="thread") as in_thread:
        assert score_in_run(in_process, TASK, "two words") == score_in_run(in_thread, TASK, "two words")


def test_a_process_imports_no_fovea_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fovea").mkdir()
    (tmp_path / "fovea" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    with graded(tmp_path, "pid") as grading:
        assert score_in_run(grading, TASK, "").reward != os.getpid()


def test_a_list_of_rewards_is_added_in_the_process(tmp_path: Path) -> None:
    names = [f"{tmp_path}/own.py:later", f"{tmp_path}/own.py:without_torch"]
    with graded(tmp_path, "", reward=names, reward_weights=[1, 2]) as grading:
        score = score_in_run(grading, TASK, "a")
    assert (score.reward, score.parts) == (2.5, {"later": 0.5, "without_torch": 1})


def test_calls_have_so_many_processes_and_all_end_with_the_run(tmp_path: Path) -> None:
    with graded(tmp_path, "slow_pid", reward_calls_at_once=2) as grading:
        started = time.monotonic()
        answers = [[Turn(messages=(), text=str(number))] for number in range(6)]
        pids = {score.reward for score in wait_for(grading.scores(TASK, answers))}
        assert len(pids) == 2
        pids |= {score.reward for score in wait_for(grading.scores(TASK, answers[:1]))}
        assert len(pids) == 2, "they stay for the next call"
        assert time.monotonic() - started < 60
    assert os.getpid() not in pids
    assert all(map(is_gone, pids))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("hold", r"took more than reward_timeout_seconds=0\.5, and its process was killed"),
        ("die", r"ended its process \(killed by signal 9, Killed\)"),
        ("exit", r"ended its process \(exit code 7\)"),
        ("exit slowly", r"ended its process \(exit code 7\)"),
        ("raise", r"raised ValueError: too short at .*own\.py:\d+"),
        ("leave", r"raised SystemExit: 3 at .*own\.py:\d+"),
    ],
)
def test_whatever_a_call_does_costs_its_group_and_the_next_is_scored(text: str, problem: str, tmp_path: Path) -> None:
    with graded(tmp_path, "misbehaves", reward_timeout_seconds=0.5, reward_on_failure="drop") as grading:
        first = score_in_run(grading, TASK, "").reward
        started = time.monotonic()
        with pytest.raises(UnscoredError, match=rf"^train/0: .*own\.py:misbehaves {problem}$"):
            score_in_run(grading, TASK, text)
        assert time.monotonic() - started < 20
        again = score_in_run(grading, TASK, "").reward
        assert (first == again) == (text in ("raise", "leave"))
        if first != again:
            assert is_gone(first)


def test_the_end_of_a_process_that_waits_is_no_fault_of_the_next_call(tmp_path: Path) -> None:
    with graded(tmp_path, "pid") as grading:
        first = score_in_run(grading, TASK, "").reward
        os.kill(int(first), signal.SIGKILL)
        wait_until_gone(first)
        assert score_in_run(grading, TASK, "").reward != first


def test_a_call_that_no_process_has_read_is_made_again(tmp_path: Path) -> None:
    async def killed_before_it_reads(grading: Grading, pid: int) -> float:
        os.kill(pid, signal.SIGSTOP)
        task = asyncio.ensure_future(grading.scores(TASK, [[Turn(messages=(), text="")]]))
        await asyncio.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        (score,) = await task
        return score.reward

    with graded(tmp_path, "pid") as grading:
        first = int(score_in_run(grading, TASK, "").reward)
        assert wait_for(killed_before_it_reads(grading, first)) not in (first, os.getpid())


def test_an_answer_has_a_bound(tmp_path: Path) -> None:
    problem = r"returned a score of 32 MiB; return fewer or smaller parts; fix it, or set reward_on_failure=drop"
    with graded(tmp_path, "misbehaves", reward_timeout_seconds=60) as grading:
        with pytest.raises(ScoreError, match=problem):
            score_in_run(grading, TASK, "large")
        assert score_in_run(grading, TASK, "").reward != os.getpid()


def test_a_slow_import_is_no_late_call(tmp_path: Path) -> None:
    with graded(tmp_path, "pid", reward_timeout_seconds=1) as grading:
        (tmp_path / "own.py").write_text(f"import time; time.sleep(1.5)\n{REWARDS}")
        assert score_in_run(grading, TASK, "").reward != os.getpid()


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("1 / 0", r"own\.py cannot be imported: it raised ZeroDivisionError"),
        ("", r"own\.py has no pid; define it"),
        ("import os; os.kill(os.getpid(), 9)", r"own\.py:pid cannot be imported: it ended its process \(killed by sig"),
    ],
)
def test_a_function_that_cannot_be_imported_ends_the_run(code: str, problem: str, tmp_path: Path) -> None:
    with graded(tmp_path, "pid", reward_on_failure="drop") as grading:
        (tmp_path / "own.py").write_text(code)
        with pytest.raises(ConfigError, match=problem):
            score_in_run(grading, TASK, "")


def test_a_task_that_goes_to_no_other_process_is_named(tmp_path: Path) -> None:
    problem = r"the task holds an object that cannot be pickled \(TypeError: .*lock"
    with graded(tmp_path, "pid") as grading, pytest.raises(ScoreError, match=problem):
        score_in_run(grading, replace(TASK, row={"lock": Lock()}), "")


def test_a_class_of_the_environments_file_is_named(tmp_path: Path) -> None:
    """Pickles hold its name, and only the process of the run has imported the file."""
    (tmp_path / "boxes.py").write_text("class Box: ...\n")
    task = replace(TASK, row={"box": import_file(tmp_path / "boxes.py").Box()})
    with graded(tmp_path, "pid") as grading:
        before = score_in_run(grading, TASK, "").reward
        problem = r"an object that cannot be read there \(ModuleNotFoundError: .*fovea_own_boxes.*set reward_in=thread"
        with pytest.raises(ScoreError, match=problem):
            score_in_run(grading, task, "")
        assert score_in_run(grading, TASK, "").reward == before, "its process goes on"


def by_hand(task: Task, text: str, images: Sequence[Image.Image]) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"reward": by_hand}, r"reward=python:.*by_hand is an object of this process; write it into a file, reward='p"),
        ({}, r"reward_in=process runs reward functions from files, but none is set; set reward=path/to/file\.py:na"),
    ],
)
def test_only_a_function_in_a_file_runs_in_a_process(arguments: dict[str, object], problem: str) -> None:
    with pytest.raises(fovea.FoveaError, match=problem):
        fovea.GRPO(model={"tiny": {}}, environment="shapes", reward_in="process", **arguments)  # type: ignore[arg-type]


def test_a_cancelled_call_leaves_no_process(tmp_path: Path) -> None:
    """As at the end of a run by a second Ctrl-C, which cancels what is graded."""

    async def cancelled(grading: Grading) -> None:
        task = asyncio.ensure_future(grading.scores(TASK, [[Turn(messages=(), text="hold")]]))
        await asyncio.sleep(2)
        task.cancel()
        await asyncio.wait([task])

    before = set(psutil.Process().children())
    with graded(tmp_path, "misbehaves", reward_timeout_seconds=600) as grading:
        wait_for(cancelled(grading))
        for process in set(psutil.Process().children()) - before:
            wait_until_gone(process.pid)


ORPHAN = """
import sys
from pathlib import Path
from tests.environments.custom.process_rewards import TASK, graded
from gym_tests.grading import score_in_run

with graded(Path(sys.argv[1]), "misbehaves", reward_timeout_seconds=600) as grading:
    print(int(score_in_run(grading, TASK, "start").reward), flush=True)
    score_in_run(grading, TASK, sys.argv[2])
    input()
"""


@pytest.mark.kill
@pytest.mark.parametrize("text", ["hold", ""])
def test_a_process_ends_with_a_trainer_that_is_killed(text: str, tmp_path: Path) -> None:
    """Also amid a call that holds its interpreter lock, and with what it has started."""
    command = [sys.executable, "-c", ORPHAN, str(tmp_path), text]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    started = subprocess.Popen(command, cwd=ROOT, env={**environment(), "PYTHONPATH": str(ROOT)}, text=True, **pipes)
    with until_killed(started) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        time.sleep(1)
        assert not is_gone(pid)
        of_the_reward = int((tmp_path / "started").read_text())
        assert not is_gone(of_the_reward)
    wait_until_gone(pid)
    wait_until_gone(of_the_reward)
    started.communicate()


NOW_AND_THEN = """
import os, re
from pathlib import Path

CALLS = Path(__file__).with_name("calls")

def score(task, text, images):
    CALLS.with_name(f"pid-{os.getpid()}").touch()
    with CALLS.open("a") as calls:
        calls.write(".")
    if CALLS.stat().st_size == 6:
        re.match(r"(a+)+$", "a" * 40 + "b")
    if CALLS.stat().st_size == 30:
        os.kill(os.getpid(), 9)
    return len(text) % 3
"""


@pytest.mark.kill
def test_a_run_goes_on_after_a_hang_and_a_crash(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(NOW_AND_THEN)
    limits = ("reward_timeout_seconds=2", "reward_on_failure=drop", "reward_in=process")
    given = arguments(tmp_path / "run", f"reward={tmp_path / 'own.py'}:score", "max_steps=3", *limits)
    command = [sys.executable, "-m", "fovea", *given]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    unscored = (tmp_path / "run" / "unscored.jsonl").read_text()
    assert "took more than reward_timeout_seconds=2, and its process was killed" in unscored
    assert "ended its process (killed by signal 9, Killed)" in unscored
    assert sum(row["groups/unscored"] for row in read_metrics(tmp_path / "run")) <= 2
    commands = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(tmp_path) in command]


HOLDS_LATER = """
import re
from pathlib import Path

def score(task, text, images):
    Path(__file__).with_name("pids").open("a").write(f"{__import__('os').getpid()}\\n")
    if task.id.startswith("train") and len(Path(__file__).with_name("pids").read_text().splitlines()) > 2:
        re.match(r"(a+)+$", "a" * 40 + "b")
    return 1.0
"""


@pytest.mark.kill
def test_two_signals_end_a_run_amid_a_hang(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(HOLDS_LATER)
    own = (f"reward={tmp_path / 'own.py'}:score", "reward_timeout_seconds=600", "reward_in=process")
    given = arguments(tmp_path / "run", *own, "evaluate.before_training=false")
    command = [sys.executable, "-m", "fovea", *given]
    started = subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True)
    with until_killed(started) as process:
        pids = tmp_path / "pids"
        while not pids.exists() or len(pids.read_text().splitlines()) <= 2:
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        while "a second signal ends it at once" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    for pid in set(pids.read_text().split()):
        wait_until_gone(int(pid))


@pytest.mark.parametrize("reward_in", ["thread", "process"])
def test_easyr1_functions_get_the_tokens_that_the_engine_drew(reward_in: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def compute_score(reward_inputs):\n"
        "    return [{'overall': 0.1 * each['response_length'], 'overlong': 0.0} for each in reward_inputs]\n"
    )
    words = ["max_steps=1", "evaluate.before_training=false", f"reward={tmp_path}/own.py:compute_score"]
    _, recipe, *settings = arguments(tmp_path / "run", *words, f"reward_in={reward_in}")
    config = load_config([Path(recipe)], settings)
    train(build(config))
    (step,) = read_metrics(tmp_path / "run")
    assert step["reward"] == pytest.approx(0.1 * step["response_tokens_mean"])
    assert step["response_tokens_mean"] > 1
