"""`resume=PATH`: from a named checkpoint, in its own run folder or in a new one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fovea import loop
from fovea.api.runs import load_run
from fovea.config.run import Config
from fovea.errors import ConfigError, DataError
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.report.samples import sample_steps
from fovea.report.viewed_run import ViewedRun
from fovea.run.context import Run
from fovea.run.state import TrainState
from fovea.types import Group, Metrics
from fovea.wiring.run import build
from tests.runs import untimed
from tests.saved import saved_bytes

SETTINGS: dict[str, Any] = {
    "threads": 1,
    "max_steps": 4,
    "model": {"tiny": {}, "lora": {"rank": 2}},
    "environment": {"name": "shapes", "train_size": 16, "dev_size": 4, "test_size": 4},
    "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 4},
    "evaluate": {"image_controls": False, "shared_images": "ignore", "before_training": False},
    "parity": {"prompts": 0},
    "checkpoint": {"every_steps": 1, "keep": 10},
    "log": {"tensorboard": False, "progress": False},
}


def run_in(folder: Path, **settings: object) -> Path:
    train(build(Config.model_validate({**SETTINGS, "run_dir": str(folder), **settings})))
    return folder


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step}"


def weights(run: Path) -> dict[str, bytes]:
    return saved_bytes(checkpoint(run, 4) / "trainable")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_in(tmp_path_factory.mktemp("runs") / "whole")


def test_a_new_folder_goes_on_as_the_run_did_and_holds_all_it_needs(whole: Path, tmp_path: Path) -> None:
    """Its first checkpoint is the named one, so that it can be resumed before it has saved another."""
    run_in(tmp_path / "stopped", max_steps=2, resume=str(checkpoint(whole, 2)))
    saved = sorted(path.name for path in (tmp_path / "stopped" / "checkpoints").iterdir())
    assert saved == ["step-2"]
    for name in ("trainable", "trainable_optimizer"):
        assert saved_bytes(checkpoint(tmp_path / "stopped", 2) / name) == saved_bytes(checkpoint(whole, 2) / name)
    run_in(tmp_path / "stopped", resume="auto")
    assert untimed(tmp_path / "stopped") == untimed(whole)[2:]
    assert weights(tmp_path / "stopped") == weights(whole)
    with pytest.raises(ConfigError, match=r"stopped already holds a run; set resume=auto to continue it"):
        run_in(tmp_path / "stopped", resume=str(checkpoint(whole, 2)))


def test_a_run_goes_back_to_a_checkpoint_of_its_own(whole: Path, tmp_path: Path) -> None:
    """The later ones are kept under other names."""
    run_in(tmp_path)
    run_in(tmp_path, resume=f"{checkpoint(tmp_path, 1)}/.")
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert (untimed(tmp_path), weights(tmp_path)) == (untimed(whole), weights(whole))
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {f"step-{step}" for step in range(5)} | {f"step-{step}.later" for step in (2, 3, 4)}


def test_of_what_it_goes_back_behind_nothing_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor that it has ended, as it had before, until it ends again."""
    log = {**SETTINGS["log"], "samples_every_steps": 1}
    run_in(tmp_path, log=log)
    assert ViewedRun(tmp_path).facts()["finished"]

    take = loop.take_step

    async def take_step(run: Run, state: TrainState) -> tuple[Sequence[Group], Metrics]:
        if state.step == 2:
            raise OSError("no longer")
        return await take(run, state)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "take_step", take_step)
        with pytest.raises(OSError, match="no longer"):
            run_in(tmp_path, log=log, resume=str(checkpoint(tmp_path, 1)))
    assert sample_steps(tmp_path) == [1, 2]
    facts = ViewedRun(tmp_path).facts()
    assert (facts["finished"], facts["newest_entry"]) == (False, 2)
    assert load_run(tmp_path).summary is None
    run_in(tmp_path, log=log, resume="auto")
    assert sample_steps(tmp_path) == [1, 2, 3, 4]
    assert ViewedRun(tmp_path).facts()["finished"]


def test_a_setting_that_must_not_change_is_named(whole: Path, tmp_path: Path) -> None:
    message = r"seed=7, but the run in .*whole began with 0; set it back to resume, or start anew"
    with pytest.raises(ConfigError, match=message):
        run_in(tmp_path / "new", seed=7, resume=str(checkpoint(whole, 2)))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("named", "fix"),
    [
        ("", r"set resume=.*whole/checkpoints/step-4"),
        ("checkpoints/step-9", "set it to never, to auto, or to the folder"),
    ],
)
def test_what_is_no_checkpoint_is_said(named: str, fix: str, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"is not a checkpoint, such as runs/x/checkpoints/step-100; {fix}"):
        run_in(tmp_path / "new", resume=str(whole / named))


def test_a_damaged_one_is_an_error(whole: Path, tmp_path: Path) -> None:
    run_in(tmp_path / "run", max_steps=1)
    state = checkpoint(tmp_path / "run", 1) / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"step": 1, "pace": {}}))
    with pytest.raises(DataError, match=r"step-1: this checkpoint is damaged: state\.json is not as it was written"):
        run_in(tmp_path / "new", resume=str(checkpoint(tmp_path / "run", 1)))


def test_a_resumed_run_tells_of_lost_metrics_and_passes_an_empty_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_in(tmp_path / "run", max_steps=2)
    (run / "checkpoints" / "step-99").mkdir()
    file = run / "metrics.jsonl"
    file.write_bytes(file.read_bytes().splitlines(keepends=True)[0] + b"\0" * 4096)
    capsys.readouterr()
    run_in(run, max_steps=3, resume="auto")
    assert "has no metrics of 1 of the 2 steps before the checkpoint" in capsys.readouterr().err
    assert [row["step"] for row in read_metrics(run)] == [1, 3]
    # the folder of a later step that is empty holds no checkpoint, and does not stand in the way of one
    (run / "checkpoints" / "step-4").mkdir()
    run_in(run, resume="auto")
    assert (run / "checkpoints" / "step-4" / "manifest.json").is_file()
