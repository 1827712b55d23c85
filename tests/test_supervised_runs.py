"""Whole runs with `max_restarts` whose processes are killed."""

from __future__ import annotations

import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from fovea.metrics.log import read_metrics
from tests.runs import (
    ROOT,
    arguments,
    command,
    environment,
    final_weights,
    fovea,
    fovea_here,
    going,
    until_killed,
    untimed,
    wait_for_steps,
)

pytestmark = pytest.mark.kill

STEPS = 12
SETTINGS = (f"max_steps={STEPS}", "checkpoint.every_steps=4", "max_restarts=1")


def child_of(supervisor: int) -> int:
    (child,) = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    return int(child)


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_ended(process: int) -> None:
    for _ in range(600):
        if not is_running(process):
            return
        time.sleep(0.1)
    raise AssertionError(f"process {process} was left behind")


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
    (tmp_path / "own.py").write_text(MORTAL)
    settings = (*SETTINGS, f"reward={tmp_path / 'own.py'}:reward")
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
    assert [line for line in err.splitlines() if "starting again" in line] == [
        f"killed by signal 9 (Killed): starting again from the checkpoint of step {step}; 0 restarts left until a new "
        "checkpoint"
        for step in (4, 8)
    ]
    assert "resumed at step 4 from" in out
    assert "resumed at step 8 from" in out
    fovea_here(*arguments(whole, *settings, "max_restarts=0"))
    assert untimed(killed) == untimed(whole)
    assert final_weights(killed, STEPS) == final_weights(whole, STEPS)


SUICIDE = """\
import os, signal

def reward(task, text, images):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_dies_at_the_same_place_again_ends(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SUICIDE)
    done = fovea(*arguments(tmp_path / "run", *SETTINGS, f"reward={tmp_path / 'own.py'}:reward"))
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
    (tmp_path / "own.py").write_text(LIBRARY)
    done = fovea(*arguments(tmp_path / "run", *SETTINGS, "max_steps=2", f"reward={tmp_path / 'own.py'}:reward"))
    assert done.returncode == 0, done.stderr
    assert "a library ended the process with code 1, as Ray does" in done.stderr
    assert "starting again from the beginning; 0 restarts left" in done.stderr


def test_a_run_on_ray_says_what_has_ended_it_without_restarts_too(tmp_path: Path) -> None:
    """The reward ends the process as Ray does that has lost a server; its trial call comes before Ray starts."""
    (tmp_path / "own.py").write_text(LIBRARY)
    on_ray = ("max_restarts=0", "cluster.gpus_per_node=1", f"reward={tmp_path / 'own.py'}:reward")
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
    (tmp_path / "own.py").write_text(FATAL)
    done = fovea(*arguments(tmp_path / "run", *SETTINGS, f"reward={tmp_path / 'own.py'}:reward"))
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
def test_a_signal_to_the_supervisor_lets_the_step_end_and_saves_it(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    with going(tmp_path, *SETTINGS, "max_steps=200", "checkpoint.every_steps=0", steps=3) as process:
        child = child_of(process.pid)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert f"{number.name}: the run ends after this step" in err
    assert f"saved at step {len(read_metrics(tmp_path))}" in out
    assert "starting again" not in err
    assert not is_running(child)


@pytest.mark.slow
def test_a_supervisor_that_is_killed_lets_the_run_end_saved(tmp_path: Path) -> None:
    with going(tmp_path, *SETTINGS, "max_steps=200", "checkpoint.every_steps=0", steps=3) as process:
        child = child_of(process.pid)
        process.kill()
        process.wait()
        wait_until_ended(child)
    taken = len(read_metrics(tmp_path))
    assert taken < 200
    assert (tmp_path / "checkpoints" / f"step-{taken}").is_dir()


@pytest.mark.slow
def test_a_supervised_run_stops_and_continues_with_its_shell(tmp_path: Path) -> None:
    with going(tmp_path, *SETTINGS, "max_steps=200", steps=3) as process:
        child = child_of(process.pid)
        process.send_signal(signal.SIGTSTP)
        state_of = {each: Path(f"/proc/{each}/stat") for each in (process.pid, child)}
        for _ in range(100):
            states = {path.read_text().rpartition(")")[2].split()[0] for path in state_of.values()}
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
    (tmp_path / "own.py").write_text(SUICIDE)
    more = (f"reward={tmp_path / 'own.py'}:reward", "evaluate.before_training=false")
    done = subprocess.run(
        ["script", "-qec", shlex.join(command(*arguments(tmp_path / "run", *SETTINGS, *more))), "/dev/null"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 128 + signal.SIGKILL, done.stdout
    assert done.stdout.count("\x1b[?25h") == 2, "once behind each of the two deaths"
