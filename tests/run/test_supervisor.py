"""What a supervisor makes of a death, and what a run makes of signals."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from fovea.config.run import Config
from fovea.errors import MicrobatchMemoryError, ParityError, TrainError
from fovea.run.signals import SAME_SIGNAL_SECONDS, Stop
from fovea.run.supervisor import Child, Restarts, cause_of_death, supervise
from fovea_gym.errors import ClusterError, ConfigError, OutOfMemoryError
from gym_tests.tables import table
from tests.saved import make_checkpoint


def restarts(folder: Path, **settings: object) -> Restarts:
    return Restarts(Config.model_validate({"model": {"tiny": {}}, **settings}), folder)


@table(
    ("code", "cause"),
    [
        (-signal.SIGKILL, "killed by signal 9 (Killed)"),
        (-signal.SIGSEGV, "killed by signal 11 (Segmentation fault)"),
        (-signal.SIGRTMAX, f"killed by signal {signal.SIGRTMAX} (Real-time signal 30)"),
        (ClusterError.exit_code, "a worker process failed"),
        (OutOfMemoryError.exit_code, "memory ran out"),
        (MicrobatchMemoryError.exit_code, "memory ran out in a micro-batch"),
        # the run's own end, an error of the user's or of Fovea's, and what somebody has asked for
        *((code, None) for code in (0, 1, TrainError.exit_code, ParityError.exit_code, 130, 143)),
        *((-number, None) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)),
    ],
)
def test_deaths_that_a_new_process_may_survive_have_a_cause(code: int, cause: str | None) -> None:
    assert cause_of_death(code) == cause


def test_a_new_checkpoint_gives_all_restarts_back(tmp_path: Path) -> None:
    run = restarts(tmp_path, max_restarts=2)
    for step, left in ((None, 1), (10, 1), (None, 0), (20, 1), (None, 0), (None, -1)):
        if step is not None:
            make_checkpoint(tmp_path, step)
        assert not run.refusal
        run.count()
        assert run.left == left
    assert run.refusal == "max_restarts=2 is used up without a new checkpoint"
    assert run.place == "the checkpoint of step 20"


def test_an_attempt_resumes_once_there_is_a_checkpoint(tmp_path: Path) -> None:
    run = restarts(tmp_path, max_restarts=3)
    run.count()
    assert run.words()[1:] == [f'run_dir="{tmp_path}"']
    make_checkpoint(tmp_path, 0)
    run.count()
    assert run.words()[1:] == [f'run_dir="{tmp_path}"', "resume=auto"]


def test_later_checkpoints_that_were_there_are_never_resumed(tmp_path: Path) -> None:
    """The first attempt may have died before it could say that the folder holds a run, or put later ones aside."""
    for step in (10, 20):
        make_checkpoint(tmp_path, step)
    resumed = ("never", str(tmp_path / "checkpoints" / "step-10"))
    new, named = (restarts(tmp_path, max_restarts=2, resume=resume) for resume in resumed)
    for run in (new, named):
        run.count()
        assert "resume=auto" not in run.words()
    (tmp_path / "checkpoints" / "step-20").rename(tmp_path / "checkpoints" / "step-20.later")
    named.count()
    assert "resume=auto" in named.words()


def test_a_checkpoint_that_is_written_again_is_a_new_one(tmp_path: Path) -> None:
    """A run that goes back from step 20 to 10, and dies once it has come to 20 again."""
    for step in (10, 20):
        make_checkpoint(tmp_path, step)
    run = restarts(tmp_path, max_restarts=2, resume=str(tmp_path / "checkpoints" / "step-10"))
    (tmp_path / "checkpoints" / "step-20").rename(tmp_path / "checkpoints" / "step-20.later")
    make_checkpoint(tmp_path, 20)
    later = run.newest.time_ns + 10**9
    os.utime(tmp_path / "checkpoints" / "step-20", ns=(later, later))
    run.count()
    assert run.left == 1
    assert "resume=auto" in run.words(), "it would go back to step 10 once more"
    run.count()
    run.count()
    assert run.refusal, "and no other has come since"


def test_hours_are_those_of_all_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = restarts(tmp_path, max_restarts=3, max_hours=2.0)
    run._started = 0.0  # of a machine's own clock, `started + 2 * 3600 - started` may round to less than two hours
    monkeypatch.setattr("fovea.run.supervisor.monotonic", lambda: 0.5 * 3600)
    run.count()
    assert run.words() == ["--spent-seconds=1800.000", f'run_dir="{tmp_path}"']
    monkeypatch.setattr("fovea.run.supervisor.monotonic", lambda: 2.0 * 3600)
    assert run.refusal == "max_hours=2 is reached"


def test_torchrun_restarts_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"max_restarts=1 is set under torchrun, .* give torchrun --max-restarts"):
        supervise(restarts(tmp_path, max_restarts=1).config, [])


def test_a_signal_between_two_attempts_is_for_the_next_one() -> None:
    child = Child()
    assert child.run(["true"]) == 0
    child._pass_on(signal.SIGTERM, None)
    assert child.was_signalled
    assert child.run(["sleep", "60"]) == -signal.SIGTERM


def test_the_child_is_not_a_fovea_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fovea").mkdir()
    (tmp_path / "fovea" / "__init__.py").touch()
    (tmp_path / "fovea" / "__main__.py").write_text("raise SystemExit(99)")
    monkeypatch.chdir(tmp_path)
    config = restarts(tmp_path, max_restarts=1, run_dir=str(tmp_path / "run")).config
    assert supervise(config, ["--help"]) == 0


def test_torchrun_may_signal_twice_and_elsewhere_a_second_signal_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    now = [100.0]
    monkeypatch.setattr("fovea.run.signals.perf_counter", lambda: now[0])
    stop = Stop(started=0.0)
    with pytest.raises(SystemExit), stop.after_step():  # noqa: PT012 (a stopped run ends with the block)
        for _ in range(2):
            stop.receive(signal.SIGTERM, None)
        assert stop.received is signal.SIGTERM
        now[0] += 2 * SAME_SIGNAL_SECONDS
        with pytest.raises(SystemExit):
            stop.receive(signal.SIGTERM, None)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    stop = Stop()
    with pytest.raises(SystemExit), stop.after_step():  # noqa: PT012 (the same)
        stop.receive(signal.SIGTERM, None)
        with pytest.raises(SystemExit):
            stop.receive(signal.SIGTERM, None)
