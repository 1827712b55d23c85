"""A run folder belongs to one run, and to one process at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from fovea.config.describe import describe
from fovea.config.run import Config
from fovea.errors import MicrobatchMemoryError, TrainError
from fovea.processes.owner import Owner
from fovea.run.folder import open_run_folder
from fovea.run.lock import LOCK_FILE, locked
from fovea.run.microbatches import MicrobatchTokens, leaving_limit, left_limit
from fovea.run.run_dir import link_latest
from fovea_gym.errors import ConfigError, DataError, ScoreError
from tests.saved import make_checkpoint


def config(**settings: object) -> Config:
    return Config.model_validate({"model": {"tiny": {}}, **settings})


def start(folder: Path | str, settings: Config) -> None:
    with open_run_folder(settings.model_copy(update={"run_dir": str(folder)})):
        pass


def holds_a_run(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    start(folder, config(max_steps=10))
    make_checkpoint(folder, 0)
    return folder


def test_a_start_that_failed_may_be_tried_again_and_leaves_no_new_folder(tmp_path: Path) -> None:
    start(tmp_path, config())
    start(tmp_path, config(seed=3))
    assert "seed: 3" in (tmp_path / "config.yaml").read_text()
    start(tmp_path / "runs" / "new", config())
    assert list((tmp_path / "runs").iterdir()) == []
    with open_run_folder(config(run_dir=str(tmp_path / "runs" / "kept"))):
        (tmp_path / "runs" / "kept" / "bad_rows.jsonl").touch()
    assert (tmp_path / "runs" / "kept").is_dir(), "the message of the failure refers to the list"


def fails(folder: Path, error: BaseException, metrics: str = "", **settings: object) -> None:
    with suppress(type(error)), open_run_folder(config(run_dir=str(folder), **settings)):
        make_checkpoint(folder, 0)
        (folder / "metrics.jsonl").write_text(metrics)
        raise error


@pytest.mark.parametrize(
    ("error", "settings", "stays"),
    [
        (ScoreError("train/3: boom"), {}, False),
        (DataError("train/3: bad"), {}, False),
        (ConfigError("out of range"), {}, False),
        (ScoreError("boom"), {"warmup": {}}, True),
        (TrainError("not finite"), {}, True),
        (KeyboardInterrupt(), {}, True),
        (AssertionError("a bug"), {}, True),
    ],
)
def test_a_folder_goes_with_an_error_of_the_user_in_the_first_step_without_a_warm_up(
    error: BaseException, settings: Mapping[str, object], stays: bool, tmp_path: Path
) -> None:
    fails(tmp_path / "run", error, **settings)
    assert (tmp_path / "run" / "checkpoints" / "step-0").is_dir() is stays
    assert (tmp_path / "run").exists() is stays


def test_a_folder_stays_that_was_there_before_or_has_a_time_or_a_step(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for name, metrics in (("old", ""), ("own-20261122-100000", ""), ("later", '{"step": 1}\n')):
        fails(tmp_path / name, ScoreError("boom"), metrics)
        assert (tmp_path / name).is_dir()


def test_a_run_that_has_taken_no_step_names_the_way_out(tmp_path: Path) -> None:
    folder = holds_a_run(tmp_path / "run")
    way = r"; it has taken no step: after correcting code or rows, add resume_changed=allow, or delete the folder$"
    with pytest.raises(ConfigError, match=rf"already holds a run; set resume=auto .*{way}"):
        start(folder, config())
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"or set another run_dir$"):
        start(folder, config())


def test_a_size_of_micro_batches_outlives_a_start_that_ran_out_of_memory(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    opened = open_run_folder(config(run_dir=str(folder)))
    with pytest.raises(MicrobatchMemoryError), opened, leaving_limit(folder, setting=1000):
        raise MicrobatchMemoryError("memory ran out on rank 1", next_max_tokens=500)
    assert left_limit(folder) == MicrobatchTokens(setting=1000, limit=500)


def test_a_pattern_with_a_time_gives_every_run_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with open_run_folder(config()) as one, open_run_folder(config()) as two, open_run_folder(config()) as three:
        folders = {each.run_dir for each in (one, two, three)}
        assert len(folders) == 3
        assert all(re.fullmatch(r"runs/shapes-\d{8}-\d{6}(-\d)?", folder) for folder in folders)
        assert f"run_dir: {one.run_dir}\n" in (tmp_path / one.run_dir / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"run_dir=runs/\{name\}-\{time\} is a new folder every time; .* runs/latest"):
        start(config().run_dir, config(resume="auto"))
    with open_run_folder(config(run_dir="~/{name}")) as named:
        assert named.run_dir == f"{tmp_path}/shapes"


def test_the_latest_of_the_runs_with_a_time_is_linked_and_a_resumed_one_stays_in_its_folder(tmp_path: Path) -> None:
    for name in ("shapes-20261122-100000", "shapes-20261122-100000-2", "mine"):
        (tmp_path / name).mkdir()
        link_latest(tmp_path / name)
    assert (tmp_path / "latest").readlink() == Path("shapes-20261122-100000-2")
    with open_run_folder(config(run_dir=f"{tmp_path}/latest", resume="auto")) as resumed:
        assert resumed.run_dir == str((tmp_path / "shapes-20261122-100000-2").resolve())
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    link_latest(tmp_path / "shapes-20261122-100000")
    assert not (tmp_path / "latest").is_symlink(), "a folder of the user's"


def test_a_resume_that_would_end_before_it_begins_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    folder = holds_a_run(tmp_path / "run")
    for step in (3, 4):
        make_checkpoint(folder, step)
    refused = r"max_steps=3, but the run in .*run has taken 4 steps, so nothing is left to train; set a larger max"
    with pytest.raises(ConfigError, match=refused):
        start(folder, config(resume="auto", max_steps=3))
    assert "max_steps: 10" in (folder / "config.yaml").read_text()
    start(folder, config(resume="auto", max_steps=4))  # it may have been killed in its last evaluation


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 1}, r"seed=1, but the run in .* began with 0; set it back to resume, or start over"),
        # the name before what it stands for
        ({"algorithm": {"name": "gspo"}}, r"^algorithm\.name=gspo, but the run in .* began with grpo; set it back"),
        ({"train": {"betas": (0.5, 0.6)}}, r"train\.betas=\[0\.5, 0\.6\], but the run"),
        ({"model": {"tiny": {"num_layers": 2}}}, r"model\.tiny\.num_layers=2, but the run"),
        ({"model": {"tiny": {}, "lora": {}}}, r"model\.lora"),
    ],
)
def test_resume_may_not_change_what_is_computed(changed: dict[str, object], message: str, tmp_path: Path) -> None:
    holds_a_run(tmp_path)
    with pytest.raises(ConfigError, match=message):
        start(tmp_path, config(resume="auto", **changed))


def test_a_broken_config_and_a_folder_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    written = holds_a_run(tmp_path) / "config.yaml"
    for content in ("", "{", "[1]"):
        written.write_text(content)
        with pytest.raises(ConfigError, match=r"config\.yaml cannot be read, so its run cannot be resumed"):
            start(tmp_path, config(resume="auto"))
    with pytest.raises(ConfigError, match=r"run_dir=.*config.yaml/run cannot be written: .*; set another run_dir"):
        start(written / "run", config())


PACE = {"learning_rate": 1e-7, "max_grad_norm": 0.1, "max_skipped_updates": 9}
ROWS_OF_100 = {"max_tokens_per_microbatch": 100}


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"max_steps": 20, "log": {"tensorboard": False}, "checkpoint": {"keep": 1}}, "max_steps: 20"),
        # what made the run diverge, and a batch that did not fit
        ({"train": {"lr_schedule": "linear", **PACE}}, "learning_rate: 1.0e-07"),
        ({"train": ROWS_OF_100, "rollout": {"engine": {"max_batch_tokens": 99_999}}}, "max_tokens_per_microbatch: 100"),
    ],
)
def test_resume_may_change_how_it_goes_on(changed: dict[str, object], line: str, tmp_path: Path) -> None:
    holds_a_run(tmp_path)
    start(tmp_path, config(resume="auto", **changed))
    assert line in (tmp_path / "config.yaml").read_text()


def test_what_may_change_stands_beside_the_field() -> None:
    may_change = {setting.key for setting in describe() if setting.may_change}
    free = {"max_steps", "log.progress", "evaluate.every_steps", "rollout.engine.reuse_gib", "train.backend.logits_mib"}
    free |= {"data.on_bad_row", "model.attention", "algorithm.advantage.critic.learning_rate"}
    fixed = {"seed", "rollout.engine.name", "rollout.engine.decode_weights", "train.betas", "model.path"}
    assert (free | fixed) & may_change == free


def test_a_setting_that_was_added_since_is_as_by_default(tmp_path: Path) -> None:
    holds_a_run(tmp_path)
    written = tmp_path / "config.yaml"
    written.write_text(re.sub(r"(?m)^  entropy_coef: .*\n", "", written.read_text()))
    assert "entropy_coef" not in written.read_text()
    with pytest.raises(ConfigError, match=r"algorithm\.entropy_coef=0\.5, but the run in .* began with 0\.0; set it"):
        start(tmp_path, config(resume="auto", algorithm={"entropy_coef": 0.5}))
    start(tmp_path, config(resume="auto"))


HOLD = "import sys; from pathlib import Path; from fovea.run.lock import locked\n"
HOLD += "with locked(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of a folder until its input ends."""
    arguments = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_process_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        named = rf"is in use by process {process.pid} on host {socket.gethostname()}, .* set another run_dir"
        with pytest.raises(ConfigError, match=named), locked(tmp_path):
            pass
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == process.pid, "its owner stays named"


def test_this_process_cannot_take_it_twice(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(ConfigError, match=rf"in use by process {os.getpid()}"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_an_owner_on_another_host_is_for_the_user_to_judge(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text(json.dumps(asdict(Owner(host="node-17", pid=4, started="1"))))
    refused = r"locked by process 4 on host node-17, .* delete .*run\.lock"
    with pytest.raises(ConfigError, match=refused), locked(tmp_path):
        pass
    (tmp_path / LOCK_FILE).unlink()
    with locked(tmp_path):
        pass


def test_a_killed_process_is_in_nobodys_way_and_another_one_with_its_pid_is_told_apart(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        owner = Owner(**json.loads((tmp_path / LOCK_FILE).read_text()))
        assert (owner.pid, owner.is_alive) == (process.pid, True)
        assert not replace(owner, started="1").is_alive
        process.kill()
        process.wait()
        assert not owner.is_alive
    assert (tmp_path / LOCK_FILE).read_text(), "it could not clean up"
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()


def test_without_locks_of_the_file_system_the_owner_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file system of a test machine lacks them, so the error of one that does stands in."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with holder(tmp_path) as process:
        monkeypatch.setattr(fcntl, "flock", no_locks)
        with pytest.raises(ConfigError, match=rf"in use by process {process.pid}"), locked(tmp_path):
            pass
        process.kill()
        process.wait()
        with locked(tmp_path):
            pass


def test_the_lock_of_a_folder_that_its_run_deletes_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take = fcntl.flock

    def delete_first(file: object, how: int) -> None:
        (tmp_path / LOCK_FILE).unlink()  # the run that failed: between the opening of the file and its lock
        take(file, how)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", delete_first)
    with pytest.raises(ConfigError, match=r"was just deleted by a run that ended .* start again"), locked(tmp_path):
        pass
