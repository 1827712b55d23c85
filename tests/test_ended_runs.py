"""Whole runs, as a user starts them, that signals, second processes, deaths and their supervisor come upon."""

from __future__ import annotations

import os
import shlex
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
    command,
    environment,
    final_weights,
    fovea,
    fovea_here,
    going,
    run_program,
    until_killed,
    untimed,
    wait_for_steps,
)
from tests.warm import WarmProcess

pytestmark = pytest.mark.kill

STEPS = 12


def with_reward(folder: Path, code: str) -> str:
    """Write the user's code with a function `reward`; returns the setting that names it."""
    (folder / "own.py").write_text(code)
    return f"reward={folder / 'own.py'}:reward"


def steps_of(run_dir: Path) -> list[str]:
    return sorted(folder.name for folder in (run_dir / "checkpoints").iterdir())


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
    assert f"step-{taken}" in steps_of(stopped)
    assert f"{number.name}: the run ends after this step" in err
    assert f"saved at step {taken}; run_dir={stopped} resume=auto continues from here" in out
    assert "Traceback" not in err
    assert (number is signal.SIGINT) == err.splitlines()[-1].startswith("stopped by Ctrl-C")
    if number is not signal.SIGTERM:
        return
    fovea_here(*arguments(whole, *settings))
    done = fovea_here(*arguments(stopped, *settings, "resume=auto"))
    assert f"resumed at step {taken}" in done.stdout
    assert_equal(stopped, whole, STEPS)


def assert_equal(one: Path, other: Path, steps: int) -> None:
    """Metrics but for times, and weights byte for byte."""
    assert untimed(one) == untimed(other)
    assert final_weights(one, steps) == final_weights(other, steps)


def test_a_time_limit_lets_the_step_end_and_saves_it(tmp_path: Path) -> None:
    """A limit that is over at once: every process takes one step, and the last one has no limit."""
    whole, limited = tmp_path / "whole", tmp_path / "limited"
    settings = ("max_steps=3", "checkpoint.every_steps=0")
    fovea_here(*arguments(whole, *settings))
    done = fovea_here(*arguments(limited, *settings, "max_hours=1e-9"))
    assert f"max_hours=1e-09 is reached: saved at step 1; run_dir={limited} resume=auto continues from" in done.stdout
    assert not (limited / "summary.json").exists(), "the evaluation of the end takes its time"
    done = fovea_here(*arguments(limited, *settings, "resume=auto"))
    assert "resumed at step 1" in done.stdout
    assert_equal(limited, whole, 3)


SLOW = """\
import time

def reward(task, text, images):
    time.sleep(0.4)
    return 0.0
"""


def test_a_second_signal_ends_the_run_at_once(tmp_path: Path) -> None:
    slow = (with_reward(tmp_path, SLOW), "max_steps=50", "algorithm.max_groups_without_signal=6")
    with going(tmp_path / "run", *slow, steps=1) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        while "a second signal ends it at once" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 143
    assert len(read_metrics(tmp_path / "run")) == 1, "it waited for the end of the step"
    assert steps_of(tmp_path / "run") == ["step-0"]


def started(*words: str) -> subprocess.Popen[str]:
    """A process of Python whose errors are read."""
    command = [sys.executable, *words]
    return subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True)


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
    with until_killed(started("-c", SLOW_DISK, *given)) as process:
        wait_for_steps(tmp_path, 2, process)
        while not list((tmp_path / "checkpoints").glob(".step-2.*")):
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert steps_of(tmp_path) == ["step-0", "step-2"]
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

def reward(task, text, images):
    return float(bool(re.match(r"(a+)+$", "a" * 40 + "b")))
"""
IMPATIENT = """\
from fovea.cli.main import main
from fovea_gym.graders import grading

grading.HELD_SECONDS = 1
main()
"""


def test_a_reward_that_holds_the_interpreter_lock_ends_the_run_as_one_that_hangs(tmp_path: Path) -> None:
    given = arguments(tmp_path / "run", with_reward(tmp_path, HOLDING), "reward_timeout_seconds=2")
    with until_killed(started("-c", IMPATIENT, *given)) as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 3, err
    assert f"error: {tmp_path / 'own.py'}:reward has blocked this process for 3 s" in err
    assert f'File "{tmp_path / "own.py"}", line 4 in reward' in err
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


SETTINGS = (f"max_steps={STEPS}", "checkpoint.every_steps=4", "max_restarts=1")


def child_of(supervisor: int) -> int:
    (child,) = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    return int(child)


def state_of(process: int) -> str:
    """The letter of its state; Z also where it is gone."""
    file = Path(f"/proc/{process}/stat")
    try:
        return file.read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


MORTAL = """\
import os, signal, time
from pathlib import Path

from fovea.metrics.log import read_metrics
from fovea.run.run_dir import newest_step

HERE = Path(__file__).parent

def reward(task, text, images):
    deaths = sorted((HERE / "deaths").glob("*"))
    if deaths and len(read_metrics(HERE / "killed")) >= (step := int(deaths[0].name)):
        while newest_step(HERE / "killed") < step:  # it is written beside the next step
            time.sleep(0.01)
        deaths[0].unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return len(text) / 32
"""
"""Kills its process in the step behind each that is named in `deaths`, once the checkpoint of that one is there."""


def test_a_killed_run_goes_on_by_itself_as_if_it_had_not_been(tmp_path: Path) -> None:
    """Killed twice with a single restart to spare: a checkpoint between the two gives it back."""
    whole, killed, deaths = tmp_path / "whole", tmp_path / "killed", tmp_path / "deaths"
    settings = (*SETTINGS, with_reward(tmp_path, MORTAL))
    deaths.mkdir()
    for step in (4, 8):
        (deaths / f"{step:02}").touch()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = subprocess.Popen(command(*arguments(killed, *settings)), cwd=ROOT, env=environment(), text=True, **pipes)
    with until_killed(started) as process:
        wait_for_steps(killed, 1, process)
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text(), "the parent is small"
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    again = "killed by signal 9 (Killed): starting again from the checkpoint of step {}; 0 restarts left until a new "
    found = [line for line in err.splitlines() if "starting again" in line]
    assert found == [f"{again.format(step)}checkpoint" for step in (4, 8)]
    assert all(f"resumed at step {step} from" in out for step in (4, 8))
    fovea_here(*arguments(whole, *settings, "max_restarts=0"))
    assert_equal(killed, whole, STEPS)


SUICIDE = """\
import os, signal

def reward(task, text, images):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_dies_at_the_same_place_again_ends(tmp_path: Path) -> None:
    done = fovea(*arguments(tmp_path / "run", *SETTINGS, with_reward(tmp_path, SUICIDE)))
    assert done.returncode == 128 + signal.SIGKILL
    assert done.stderr.splitlines() == [
        "killed by signal 9 (Killed): starting again from the beginning; 0 restarts left until a new checkpoint",
        "killed by signal 9 (Killed), and max_restarts=1 is used up without a new checkpoint; resume=auto continues "
        "from the beginning",
    ]


LIBRARY = """\
import os
from pathlib import Path

def reward(task, text, images):
    mark = Path(__file__).with_name("died")
    if not mark.exists():
        mark.touch()
        os._exit(1)  # as a library in C does
    return len(text) / 32
"""


def test_a_run_whose_process_a_library_ends_goes_on(tmp_path: Path) -> None:
    done = fovea(*arguments(tmp_path / "run", *SETTINGS, "max_steps=2", with_reward(tmp_path, LIBRARY)))
    assert done.returncode == 0, done.stderr
    assert "a library ended the process with code 1, as Ray does" in done.stderr
    assert "starting again from the beginning; 0 restarts left" in done.stderr


def test_a_run_on_ray_says_what_has_ended_it_without_restarts_too(tmp_path: Path) -> None:
    """The reward ends the process as Ray does that has lost a server; its trial call comes before Ray starts."""
    on_ray = ("max_restarts=0", "cluster.gpus_per_node=1", with_reward(tmp_path, LIBRARY))
    done = fovea(*arguments(tmp_path / "run", *(each for each in SETTINGS if "max_restarts" not in each), *on_ray))
    assert done.returncode == 3, done.stderr
    assert done.stderr.splitlines() == [
        "a library ended the process with code 1, as Ray does when its raylet has ended, and max_restarts=0 allows no "
        "restart; resume=auto continues from the beginning"
    ]


FATAL = """\
import os, signal
from pathlib import Path

from fovea.run.run_dir import newest_step

def reward(task, text, images):
    if newest_step(Path(__file__).parent / "run") >= 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return len(text) / 32
"""


def test_a_run_that_dies_behind_the_same_checkpoint_again_ends(tmp_path: Path) -> None:
    """Going on from a checkpoint must not make it look like a new one, which would give the restarts back."""
    done = fovea(*arguments(tmp_path / "run", *SETTINGS, with_reward(tmp_path, FATAL)))
    assert done.returncode == 128 + signal.SIGKILL
    died = [line for line in done.stderr.splitlines() if "SIGKILL" in line or "killed by signal 9" in line]
    assert len(died) == 2, done.stderr
    assert "starting again from the checkpoint of step 4; 0 restarts left" in died[0]
    assert "max_restarts=1 is used up without a new checkpoint" in died[1]


def test_an_error_of_the_user_is_final_and_leaves_no_folder(tmp_path: Path) -> None:
    pattern = tmp_path / "runs" / "{name}-{time}"
    done = fovea(*arguments(pattern, *SETTINGS, "reward=missing.py:reward"))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)], ids=str
)
def test_a_signal_to_the_supervisor_lets_the_step_end_saved(number: signal.Signals, code: int, tmp_path: Path) -> None:
    with going(tmp_path, *SETTINGS, "max_steps=200", "checkpoint.every_steps=0", steps=3) as process:
        child = child_of(process.pid)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert f"{number.name}: the run ends after this step" in err
    assert f"saved at step {len(read_metrics(tmp_path))}" in out
    assert "starting again" not in err
    assert state_of(child) == "Z"


@pytest.mark.slow
def test_a_supervisor_that_is_killed_lets_the_run_end_saved(tmp_path: Path) -> None:
    with going(tmp_path, *SETTINGS, "max_steps=200", "checkpoint.every_steps=0", steps=3) as process:
        child = child_of(process.pid)
        process.kill()
        process.wait()
        for _ in range(600):
            if state_of(child) == "Z":
                break
            time.sleep(0.1)
        assert state_of(child) == "Z", "left behind"
    taken = len(read_metrics(tmp_path))
    assert taken < 200
    assert (tmp_path / "checkpoints" / f"step-{taken}").is_dir()


@pytest.mark.slow
def test_a_supervised_run_stops_and_continues_with_its_shell(tmp_path: Path) -> None:
    with going(tmp_path, *SETTINGS, "max_steps=200", steps=3) as process:
        child = child_of(process.pid)
        process.send_signal(signal.SIGTSTP)
        for _ in range(100):
            states = {state_of(each) for each in (process.pid, child)}
            if states == {"T"}:
                break
            time.sleep(0.05)
        assert states == {"T"}, "both are stopped"
        taken = len(read_metrics(tmp_path))
        process.send_signal(signal.SIGCONT)
        while len(read_metrics(tmp_path)) <= taken:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 143


@pytest.mark.slow
def test_a_supervised_run_has_the_terminal(tmp_path: Path) -> None:
    """The live display writes to the terminal that `script` makes, and a killed one gives its cursor back."""
    more = (with_reward(tmp_path, SUICIDE), "evaluate.before_training=false")
    words = command(*arguments(tmp_path / "run", *SETTINGS, *more))
    done = run_program(["script", "-qec", shlex.join(words), "/dev/null"])
    assert done.returncode == 128 + signal.SIGKILL, done.stdout
    assert done.stdout.count("\x1b[?25h") == 2, "once behind each of the two deaths"
