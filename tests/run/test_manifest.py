"""Damage to a checkpoint is found, named, and gone around."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fovea.commands.targets import find_checkpoint
from fovea.loop import train
from fovea.run.checkpoint import MANIFEST, Checkpoints, SavedCheckpoint, damage, write_manifest
from fovea_gym.errors import DataError
from tests.fakes import bandit_run
from tests.runs import untimed


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


@pytest.mark.parametrize(
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
    said: list[str] = []
    resumed.progress.print = lambda line: said.append(str(line))  # type: ignore[method-assign]
    train(resumed)
    assert said[0] == f"{spoiled} is damaged: it is skipped, and kept as step-20.damaged"
    assert said[0] in capsys.readouterr().err, "said also where log.progress=false"
    assert "resumed at step 10" in said[1]
    assert untimed(broken) == untimed(whole)
    names = {folder.name for folder in (broken / "checkpoints").iterdir()}
    assert names == {"step-20", "step-20.damaged", "step-30"}
    assert latest(broken).step == 30
    assert damage(spoiled) is None, "saved again on the way"


def test_a_checkpoint_under_the_name_of_another_step_is_damaged(tmp_path: Path) -> None:
    train(bandit_run(tmp_path, max_steps=20))
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "step-20").rename(checkpoints / "step-30")
    found = latest(tmp_path)
    assert (found.step, found.passed_over) == (10, (checkpoints / "step-30",))


def test_a_checkpoint_of_an_earlier_format_is_refused_with_the_version_that_wrote_it(tmp_path: Path) -> None:
    """Neither read nor passed over for an older one."""
    train(bandit_run(tmp_path, max_steps=20))
    (tmp_path / "config.yaml").touch()
    newest = tmp_path / "checkpoints" / "step-20"
    state = json.loads((newest / "state.json").read_text())
    del state["format"]
    (newest / "state.json").write_text(json.dumps(state | {"fingerprint": {"library fovea": "0.0.9"}}))
    write_manifest(newest)
    refused = r"step-20: this checkpoint has format 1, .*; Fovea 0\.0\.9 wrote it: resume"
    for read in (lambda: bandit_run(tmp_path, resume=True), lambda: find_checkpoint(newest)):
        with pytest.raises(DataError, match=refused):
            read()


def test_without_any_whole_checkpoint_nothing_goes_on(tmp_path: Path) -> None:
    train(bandit_run(tmp_path, max_steps=20))
    for folder in (tmp_path / "checkpoints").iterdir():
        flip(folder / "table.json")
    with pytest.raises(DataError, match=r"step-20: this checkpoint is damaged: table\.json .* start over in another"):
        Checkpoints(tmp_path, keep=2).latest()


def test_a_damaged_checkpoint_that_is_named_is_an_error_with_another_to_name(tmp_path: Path) -> None:
    train(bandit_run(tmp_path, max_steps=20))
    (tmp_path / "config.yaml").touch()
    checkpoints = tmp_path / "checkpoints"
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
