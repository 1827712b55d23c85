"""Whole runs, as a user starts them, that signals and second processes come upon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fovea.metrics.log import read_metrics
from fovea.run.supervisor import cause_of_death
from tests.runs import (
    ROOT,
    arguments,
    environment,
    final_weights,
    fovea,
    fovea_here,
    going,
    until_killed,
    untimed,
    wait_for_steps,
)
from tests.warm import WarmProcess

pytestmark = pytest.mark.kill

STEPS = 12


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)], ids=str
)
def test_a_signal_lets_the_step_end_and_saves_it(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """The run that goes on from there equals one that was never stopped."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    settings = (f"max_steps={STEPS}", "checkpoint.every_steps=0")
    with going(stopped, *settings, steps=3) as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    taken = len(read_metrics(stopped))
    assert 3 <= taken < STEPS
    assert (stopped / "checkpoints" / f"step-{taken}").is_dir()
    assert f"{number.name}: the run ends after this step" in err
    assert f"saved at step {taken}; run_dir={stopped} resume=auto continues from here" in out
    assert "Traceback" not in err
    assert (number is signal.SIGINT) == err.splitlines()[-1].startswith("stopped by Ctrl-C")
    if number is not signal.SIGTERM:
        return
    fovea_here(*arguments(whole, *settings))
    done = fovea_here(*arguments(stopped, *settings, "resume=auto"))
    assert f"resumed at step {taken}" in done.stdout
    assert untimed(stopped) == untimed(whole)
    assert final_weights(stopped, STEPS) == final_weights(whole, STEPS)


def test_a_time_limit_lets_the_step_end_and_saves_it(tmp_path: Path) -> None:
    """A limit that is over at once: every process takes one step, and the last one has no limit."""
    whole, limited = tmp_path / "whole", tmp_path / "limited"
    settings = ("max_steps=3", "checkpoint.every_steps=0")
    fovea_here(*arguments(whole, *settings))
    done = fovea_here(*arguments(limited, *settings, "max_hours=1e-9"))
    said = f"max_hours=1e-09 is reached: saved at step 1; run_dir={limited} resume=auto continues from here"
    assert said in done.stdout
    assert not (limited / "summary.json").exists(), "the evaluation of the end takes its time"
    done = fovea_here(*arguments(limited, *settings, "resume=auto"))
    assert "resumed at step 1" in done.stdout
    assert untimed(limited) == untimed(whole)
    assert final_weights(limited, 3) == final_weights(whole, 3)


SLOW_REWARD = """\
import time

def late(task, text, images):
    time.sleep(0.4)
    return 0.0
"""


def test_a_second_signal_ends_the_run_at_once(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SLOW_REWARD)
    slow = (f"reward={tmp_path / 'own.py'}:late", "max_steps=50", "algorithm.max_groups_without_signal=6")
    with going(tmp_path / "run", *slow, steps=1) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        while "a second signal ends it at once" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 143
    assert len(read_metrics(tmp_path / "run")) == 1, "it waited for the end of the step"
    assert [folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-0"]


SLOW_DISK = """\
import time
from fovea.cli.main import main
from fovea.run import checkpoint

at_once = checkpoint.write_manifest

def write_manifest(folder):
    time.sleep(2)
    at_once(folder)

checkpoint.write_manifest = write_manifest
main()
"""


def test_a_signal_while_the_last_checkpoint_is_written_waits_for_it(tmp_path: Path) -> None:
    given = arguments(tmp_path, "max_steps=2", "checkpoint.every_steps=0", "evaluate.before_training=false")
    started = subprocess.Popen(
        [sys.executable, "-c", SLOW_DISK, *given], cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True
    )
    with until_killed(started) as process:
        wait_for_steps(tmp_path, 2, process)
        while not list((tmp_path / "checkpoints").glob(".step-2.*")):
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir()) == ["step-0", "step-2"]
    assert not (tmp_path / "summary.json").exists(), "the evaluation of the end takes its time"


def test_a_signal_while_a_run_is_built_leaves_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with until_killed(WarmProcess(["fovea", *arguments(folder)], environment())) as process:
        while not (folder / "config.yaml").exists():
            time.sleep(0.001)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143
    assert not folder.exists()


HOLDING = """\
import re

def score(task, text, images):
    return float(bool(re.match(r"(a+)+$", "a" * 40 + "b")))
"""
IMPATIENT = """\
import sys
from fovea.cli.main import main
from fovea_gym.graders import grading

grading.HELD_SECONDS = 1
main()
"""


def test_a_reward_that_holds_the_interpreter_lock_ends_the_run_as_one_that_hangs(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(HOLDING)
    given = arguments(tmp_path / "run", f"reward={tmp_path / 'own.py'}:score", "reward_timeout_seconds=2")
    started = subprocess.Popen(
        [sys.executable, "-c", IMPATIENT, *given], cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True
    )
    with until_killed(started) as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 3, err
    assert f"error: {tmp_path / 'own.py'}:score has blocked this process for 3 s" in err
    assert f'File "{tmp_path / "own.py"}", line 4 in score' in err
    assert cause_of_death(process.returncode) is not None, "max_restarts starts it again"


def test_under_nohup_a_closed_terminal_is_nothing_to_a_run(tmp_path: Path) -> None:
    command = ["nohup", sys.executable, "-m", "fovea", *arguments(tmp_path, f"max_steps={STEPS}")]
    with until_killed(subprocess.Popen(command, cwd=ROOT, env=environment(), text=True)) as process:
        wait_for_steps(tmp_path, 3, process)
        process.send_signal(signal.SIGHUP)
        assert process.wait(timeout=120) == 0
    assert len(read_metrics(tmp_path)) == STEPS


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_a_second_process_leaves_a_running_run_alone(resume: str, tmp_path: Path) -> None:
    shared, settings = tmp_path / "shared", (f"max_steps={STEPS}", "checkpoint.every_steps=3")
    with going(shared, *settings, steps=4) as process:
        os.kill(process.pid, signal.SIGSTOP)  # held where it is, so that the two certainly meet
        second = fovea(*arguments(shared, *settings, f"resume={resume}"))
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(timeout=120) == 0
    assert second.returncode == 2
    assert f"error: run_dir={shared} is in use by process {process.pid} on host" in second.stderr
    assert len(second.stderr.strip().splitlines()) == 1
    assert [row["step"] for row in read_metrics(shared)] == list(range(1, STEPS + 1)), "it has lost no line"
