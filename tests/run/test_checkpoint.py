"""Checkpoints: what they keep, which outlive newer ones, `resume=PATH` from a named one, and damage to them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fovea import loop
from fovea.api.targets import load_run
from fovea.commands.targets import find_checkpoint
from fovea.config.run import Config
from fovea.evaluation.controls import Searched, SharedImages
from fovea.evaluation.evaluator import Evaluator
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.report.samples import sample_steps
from fovea.report.viewed_run import ViewedRun
from fovea.run.checkpoint import MANIFEST, Checkpoints, RetainedCheckpoints, SavedCheckpoint, damage, write_manifest
from fovea.run.context import Run
from fovea.run.microbatches import MicrobatchTokens
from fovea.run.state import TrainState
from fovea.types import Batch, Evaluation, Group, Metrics
from fovea.wiring.run import build
from fovea_gym.errors import ConfigError, DataError
from gym_tests.environments.files import files, row
from gym_tests.tables import table
from tests.fakes import BanditPolicy, bandit_run, printed_in
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
    assert saved_steps(tmp_path / "stopped") == [2]
    for name in ("trainable", "trainable_optimizer"):
        assert saved_bytes(checkpoint(tmp_path / "stopped", 2) / name) == saved_bytes(checkpoint(whole, 2) / name)
    run_in(tmp_path / "stopped", resume="auto")
    assert untimed(tmp_path / "stopped") == untimed(whole)[2:]
    assert weights(tmp_path / "stopped") == weights(whole)
    with pytest.raises(ConfigError, match=r"stopped already holds a run; set resume=auto to continue it"):
        run_in(tmp_path / "stopped", resume=str(checkpoint(whole, 2)))


def test_a_run_goes_back_to_a_checkpoint_of_its_own(whole: Path, tmp_path: Path) -> None:
    run_in(tmp_path)
    run_in(tmp_path, resume=f"{checkpoint(tmp_path, 1)}/.")
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert (untimed(tmp_path), weights(tmp_path)) == (untimed(whole), weights(whole))
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {f"step-{step}" for step in range(5)} | {f"step-{step}.later" for step in (2, 3, 4)}


def test_of_what_it_goes_back_behind_nothing_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


NOT_ONE = r"is not a checkpoint, such as runs/x/checkpoints/step-100; set"


@pytest.mark.parametrize(
    ("named", "settings", "message"),
    [
        ("", {}, rf"{NOT_ONE} resume=.*whole/checkpoints/step-4"),
        ("checkpoints/step-9", {}, rf"{NOT_ONE} it to never, to auto, or to the folder"),
        ("checkpoints/step-2", {"seed": 7}, r"seed=7, but the run in .*whole began with 0; set it back to resume, or"),
    ],
)
def test_what_cannot_be_resumed_is_said(
    named: str, settings: Mapping[str, object], message: str, whole: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_in(tmp_path / "new", **settings, resume=str(whole / named))
    assert not (tmp_path / "new").exists()


def test_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    state = checkpoint(run_in(tmp_path / "run", max_steps=1), 1) / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"step": 1, "pace": {}}))
    with pytest.raises(DataError, match=r"step-1: this checkpoint is damaged: state\.json differs from what was"):
        run_in(tmp_path / "new", resume=str(state.parent))


def test_a_resume_tells_of_lost_metrics_and_empty_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_in(tmp_path / "run", max_steps=2)
    (run / "checkpoints" / "step-99").mkdir()
    file = run / "metrics.jsonl"
    file.write_bytes(file.read_bytes() + b"\0" * 4096)
    capsys.readouterr()
    run_in(run, max_steps=3, resume="auto")
    assert "metrics.jsonl ended in 4096 NUL bytes, as after a power failure" in capsys.readouterr().err
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3]
    first, *_, third = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + third + b"\0" * 4096)
    run_in(run, resume="auto")
    assert "has no metrics of 1 of the 3 steps before the checkpoint" in capsys.readouterr().err
    assert [row["step"] for row in read_metrics(run)] == [1, 3, 4]
    # the folder of a later step that is empty holds no checkpoint, and does not stand in the way of one
    (run / "checkpoints" / "step-5").mkdir()
    run_in(run, max_steps=5, resume="auto")
    assert (run / "checkpoints" / "step-5" / "manifest.json").is_file()


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize("stop_after", [30, 14], ids=["in one go", "resumed"])
def test_the_best_checkpoint_is_kept(stop_after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read at steps 6, 12, ..., of which 12 is the best; checkpoints come every 10 steps."""
    readings = iter([0.0, 0.3, 0.9, *([0.5] * 20)])

    async def evaluate(self: Evaluator, *_: object, **__: object) -> Evaluation:
        value = next(readings)
        return Evaluation(accuracies={"all": (value,)}, rewards=(value,))

    monkeypatch.setattr(Evaluator, "evaluate", evaluate)
    settings: Mapping[str, object] = {
        "checkpoint": {"every_steps": 10, "keep_best": True},
        "evaluate": {"every_steps": 6, "image_controls": False, "shared_images": "ignore"},
    }
    train(bandit_run(tmp_path, max_steps=stop_after, **settings))
    if stop_after < 30:
        train(bandit_run(tmp_path, resume=True, max_steps=30, **settings))
    assert saved_steps(tmp_path) == [12, 20, 30]


def test_the_last_checkpoint_before_updates_fail_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = BanditPolicy.update

    async def failing_from_16_on(self: BanditPolicy, batch: Batch) -> Metrics:
        metrics = await update(self, batch)
        return metrics | {"updates_skipped": float(self.updates >= 16)}

    monkeypatch.setattr(BanditPolicy, "update", failing_from_16_on)
    run = bandit_run(tmp_path, checkpoint={"every_steps": 3})
    said = printed_in(run)
    train(run)
    assert saved_steps(tmp_path) == [15, 27, 30]
    assert f"the checkpoint before it, {tmp_path / 'checkpoints' / 'step-15'}, is kept" in "".join(said)


def test_once_updates_are_taken_again_nothing_is_kept_beyond_and_the_best_needs_dev_readings() -> None:
    kept = RetainedCheckpoints().after_step(5, {"updates_skipped": 1.0}, keep_best=False)
    for skipped, steps in ((1.0, {4}), (0.0, set())):
        assert kept.after_step(6, {"updates_skipped": skipped}, keep_best=False).steps([2, 4, 6]) == steps
    with pytest.raises(ValueError, match=r"keep_best=true .* evaluate\.every_steps=0 never evaluates; set evaluate\."):
        Config.model_validate({"model": {"tiny": {}}, "checkpoint": {"keep_best": True}})


def test_progress_survives_its_json_form() -> None:
    before = Evaluation(accuracies={"count": (1.0, 0.0, 0.5), "colour": ()}, num_unscored=2)
    figures: Any = {"step": 7, "kl_coef": 0.02, "warmup_seconds": 3.0, "rl_seconds": 5.0, "started": 0.0}
    figures["microbatches"] = MicrobatchTokens(setting=1000, limit=250)
    shared = SharedImages(shared=4, test=Searched(rows=5, of=5), train=Searched(rows=6, of=60))
    state = TrainState(before=before, after_warmup=None, shared_images=shared, **figures)
    saved = json.loads(json.dumps(state.to_json()))
    loaded = TrainState.from_json(7, saved, started=0.0)
    assert (loaded.before, loaded.after_warmup, loaded.microbatches) == (before, None, state.microbatches)
    assert loaded.to_json() | {"earlier_seconds": 0.0} == state.to_json() | {"earlier_seconds": 0.0}
    assert loaded.earlier_seconds == saved["earlier_seconds"] > 0


def test_a_resume_tells_of_lost_bad_rows_and_cuts_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("What?", "3", colour) for colour in ("red", "green", "blue")]
    environment = {"name": "geo3k", **files(tmp_path, [row("Bad?", "4") | {"images": []}, *rows])}
    evaluate = SETTINGS["evaluate"] | {"before_training": True}
    settings = {"environment": environment, "data": {"on_bad_row": "skip"}, "evaluate": evaluate}
    run = run_in(tmp_path / "run", **settings, max_steps=1)
    (run / "unscored.jsonl").write_bytes(b'{"step": 1, "reason": "x"}\n\0\0\0')
    assert len((run / "bad_rows.jsonl").read_bytes().splitlines()) == 1
    (run / "bad_rows.jsonl").write_bytes(b"\0" * 4096)
    state = checkpoint(run, 1) / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"unscored_bytes": 30}))
    write_manifest(checkpoint(run, 1))
    capsys.readouterr()
    run_in(run, **settings, max_steps=2, resume="auto")
    assert "bad_rows.jsonl lacks 1 of the rows listed before the checkpoint" in capsys.readouterr().err
    assert (run / "unscored.jsonl").read_bytes() == b'{"step": 1, "reason": "x"}\n'
    assert len(list(map(json.loads, (run / "bad_rows.jsonl").read_bytes().splitlines()))) == 1


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[5] ^= 0x40
    file.write_bytes(content)


def zero_page(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:100] + bytes(4096) + content[100 + 4096 :])


def latest(folder: Path) -> SavedCheckpoint:
    found = Checkpoints(folder, keep=2).latest()
    assert found is not None
    return found


def test_the_checksums_are_those_of_sha256sum(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    for name in ("a", "inner/b"):
        (tmp_path / name).write_bytes(name.encode() * 100_000)
    write_manifest(tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    lines = "".join(f"{entry['sha256']}  {name}\n" for name, entry in manifest.items())
    subprocess.run(["sha256sum", "--check", "--strict"], input=lines, text=True, cwd=tmp_path, check=True)
    assert [entry["bytes"] for entry in manifest.values()] == [100_000, 700_000]


@table(
    ("spoil", "problem"),
    [
        (lambda folder: flip(folder / "b"), "b differs from what was written"),
        (lambda folder: os.truncate(folder / "b", 50 * 255 - 1), "b differs from what was written"),
        (lambda folder: zero_page(folder / "b"), "b differs from what was written"),
        (lambda folder: (folder / "b").unlink(), "b is missing"),
        (lambda folder: (folder / MANIFEST).unlink(), "manifest.json is missing"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "its manifest.json cannot be read (JSONDecodeError"),
        (lambda folder: (folder / MANIFEST).write_text("[1]"), "its manifest.json cannot be read (AttributeError"),
        (lambda folder: (folder / MANIFEST).write_text('{"b": 1}'), "its manifest.json cannot be read (TypeError"),
    ],
)
def test_every_damage_is_named(spoil: Callable[[Path], object], problem: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(bytes(range(1, 256)) * 50)
    write_manifest(tmp_path)
    assert damage(tmp_path) is None
    spoil(tmp_path)
    assert (damage(tmp_path) or "").startswith(problem)


@pytest.mark.parametrize("content", [None, '{"step": 10}', "[]", '{"step": "20", "order": 1}'])
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(bandit_run(whole))
    train(bandit_run(broken, max_steps=20))
    spoiled = broken / "checkpoints" / "step-20"
    if content is None:
        flip(spoiled / "table.json")
    else:
        (spoiled / "state.json").write_text(content)
    resumed = bandit_run(broken, resume=True)
    said = printed_in(resumed)
    train(resumed)
    assert said[0] == f"{spoiled} is damaged: it is skipped, and kept as step-20.damaged"
    assert said[0] in capsys.readouterr().err, "said also where log.progress=false"
    assert "resumed at step 10" in said[1]
    assert untimed(broken) == untimed(whole)
    names = {folder.name for folder in (broken / "checkpoints").iterdir()}
    assert names == {"step-20", "step-20.damaged", "step-30"}
    assert latest(broken).step == 30
    assert damage(spoiled) is None, "saved again on the way"


def stopped_run(folder: Path) -> Path:
    """The checkpoints of a run of twenty steps: those of the tenth and the last."""
    train(bandit_run(folder, max_steps=20))
    (folder / "config.yaml").touch()
    return folder / "checkpoints"


def test_a_checkpoint_under_the_name_of_another_step_is_damaged(tmp_path: Path) -> None:
    checkpoints = stopped_run(tmp_path)
    (checkpoints / "step-20").rename(checkpoints / "step-30")
    found = latest(tmp_path)
    assert (found.step, found.passed_over) == (10, (checkpoints / "step-30",))


def test_a_checkpoint_of_an_earlier_format_is_refused_with_the_version_that_wrote_it(tmp_path: Path) -> None:
    """Neither read nor passed over for an older one."""
    newest = stopped_run(tmp_path) / "step-20"
    state = json.loads((newest / "state.json").read_text())
    del state["format"]
    (newest / "state.json").write_text(json.dumps(state | {"fingerprint": {"library fovea": "0.0.9"}}))
    write_manifest(newest)
    refused = r"step-20: this checkpoint has format 1, .*; Fovea 0\.0\.9 wrote it: resume"
    for read in (lambda: bandit_run(tmp_path, resume=True), lambda: find_checkpoint(newest)):
        with pytest.raises(DataError, match=refused):
            read()


def test_without_any_whole_checkpoint_nothing_goes_on(tmp_path: Path) -> None:
    for folder in stopped_run(tmp_path).iterdir():
        flip(folder / "table.json")
    with pytest.raises(DataError, match=r"step-20: this checkpoint is damaged: table\.json .* start over in another"):
        Checkpoints(tmp_path, keep=2).latest()


def test_a_damaged_checkpoint_that_is_named_is_an_error_with_another_to_name(tmp_path: Path) -> None:
    checkpoints = stopped_run(tmp_path)
    for step in (10, 20):
        (checkpoints / f"step-{step}" / "weights").write_bytes(b"weights")
        write_manifest(checkpoints / f"step-{step}")
    assert find_checkpoint(checkpoints / "step-20").folder.name == find_checkpoint(tmp_path).folder.name == "step-20"
    flip(checkpoints / "step-20" / "weights")
    with pytest.raises(DataError, match=r"step-20: .*weights differs .*; name .*step-10 instead"):
        find_checkpoint(checkpoints / "step-20")
    with pytest.raises(DataError, match=r"step-20 is damaged; name .*step-10 for the checkpoint before it"):
        find_checkpoint(tmp_path)


def test_remains_of_a_killed_process_are_cleared_away_on_resume(tmp_path: Path) -> None:
    train(bandit_run(tmp_path, max_steps=10))
    checkpoints = tmp_path / "checkpoints"
    for name in (".step-0.deleted", ".step-30.partial", "step-10-mine"):
        (checkpoints / name).mkdir()
    assert Checkpoints(tmp_path, keep=2).resume() is not None
    assert {path.name for path in checkpoints.iterdir()} == {"step-0", "step-10", "step-10-mine"}
