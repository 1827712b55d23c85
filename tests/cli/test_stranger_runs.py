"""Run folders of strangers under every command that reads one: a line of an error, in time, and nothing leaks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner, Result

from fovea.cli.main import app
from fovea.commands.serve import served_folder
from fovea.config.loading import load_config
from fovea.config.recipes import read_yaml
from fovea.report.viewed_run import ViewedRun
from fovea.run.checkpoint import damage, read_checkpoint, write_manifest
from fovea.run.folder import open_run_folder
from fovea.run.microbatches import left_limit
from fovea.view.server import make_app
from fovea_gym.errors import ConfigError, DataError, FoveaError

PRIVATE = b"-----BEGIN OPENSSH PRIVATE KEY-----"
NAME = "0123456789abcdef"
MESSAGE = {"role": "user", "parts": [{"name": NAME}, "q"]}
ANSWER = {"turns": [{"text": "a"}], "reward": 0.5, "accuracy": 0.5}
RECORD = {"id": "train/0", "kind": "k", "question": "q", "truth": "t", "messages": [MESSAGE], "answers": [ANSWER]}
LEVELS = list(zip("abcdefghi", "bcdefghij", strict=True))
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in LEVELS
)
MERGED = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}\n" for before, name in LEVELS
)
FILES = ("metrics.jsonl", "summary.json", "versions.json", "config.yaml", "samples/index.jsonl")


def fovea(*words: str) -> Result:
    return CliRunner().invoke(app, words, env={"COLUMNS": "400"})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of one step with a picture, and a checkpoint without weights."""
    folder = tmp_path / "run"
    (folder / "samples" / "images").mkdir(parents=True)
    (folder / "config.yaml").write_text("max_steps: 1\nmodel: {tiny: {}}\n")
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    (folder / "samples" / "step-000001.jsonl").write_text(json.dumps(RECORD) + "\n")
    (folder / "samples" / "images" / f"{NAME}.png").write_bytes(b"png")
    checkpoint = folder / "checkpoints" / "step-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text('{"format": 2, "step": 1}')
    write_manifest(checkpoint)
    return folder


def refused(*words: str) -> str:
    """The one line of a command that ends with an error of the user's."""
    done = fovea(*words)
    assert done.exit_code == 2, done.output
    assert not isinstance(done.exception, FoveaError)
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    return done.stderr


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def zeros(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    path.write_bytes(b"")
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("make", [fifo, zeros, sparse])
@pytest.mark.parametrize("name", FILES)
def test_no_file_of_a_run_hangs_a_report_or_fills_memory(name: str, make: Callable[[Path], None], run: Path) -> None:
    make(run / name)
    assert name.rpartition("/")[2] in refused("report", str(run))


def test_a_picture_that_is_a_link_is_in_no_page(run: Path, tmp_path: Path) -> None:
    private = tmp_path / "id_rsa"
    private.write_bytes(PRIVATE)
    picture = run / "samples" / "images" / f"{NAME}.png"
    picture.unlink()
    picture.symlink_to(private)
    assert "leads out of" in refused("report", str(run))
    assert not (run / "report.html").exists()
    out = tmp_path / "out.html"
    assert "leads out of" in refused("view", str(run), "--export", str(out))
    assert not out.exists()
    # a folder on the way is the same
    picture.unlink()
    (run / "samples" / "images").rmdir()
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / f"{NAME}.png").write_bytes(PRIVATE)
    (run / "samples" / "images").symlink_to(tmp_path / "pictures")
    assert "leads out of" in refused("report", str(run))


def test_serving_deletes_nothing_through_a_link(run: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine" / "checkpoints" / "step-1"
    mine.mkdir(parents=True)
    (mine / "weights").write_text("mine")
    os.utime(mine, (0, 0))
    (run / "exports").symlink_to("../mine/checkpoints")
    with pytest.raises(DataError, match=r"\bexports/step-1\b"):
        served_folder(str(run), print)
    assert (mine / "weights").read_text() == "mine"


@pytest.mark.parametrize("name", ["samples", "checkpoints", "answers", "samples/index.jsonl", "run.lock"])
def test_a_resumed_run_writes_through_no_link(name: str, run: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "file").write_text("mine")
    path = run / name
    if path.is_dir():
        path.rename(tmp_path / "old")
    path.symlink_to(mine / "file" if "." in name else mine)
    config = load_config([run / "config.yaml"], [f"run_dir={run}", "resume=auto"])
    with pytest.raises((ConfigError, DataError), match=r"leads out of|cannot be written"), open_run_folder(config):
        pass
    assert [file.name for file in mine.iterdir()] == ["file"]
    assert (mine / "file").read_text() == "mine"


@pytest.mark.parametrize("text", [BOMB, MERGED, "a: " + "[" * 500])
def test_a_small_yaml_takes_no_memory(text: str, run: Path) -> None:
    with pytest.raises(ConfigError, match=r"aliases expand to more than 1 MiB|nested too deep"):
        read_yaml(text, "config.yaml")
    aliases = {"a": {"x": [1, 2]}, "b": {"x": [1, 2], "y": {"x": [1, 2]}}}
    assert read_yaml("a: &a {x: [1, 2]}\nb: {<<: *a, y: *a}", "x") == aliases, "as a person writes them"
    (run / "config.yaml").write_text(text)
    refused("report", str(run))
    refused("train", str(run / "config.yaml"))
    if text == BOMB:
        refused("eval", str(run))
        refused("plan", str(run / "config.yaml"))
        for command, option in (("view", "--export"), ("export", "--out")):
            refused(command, str(run), option, str(run / "out"))


def test_names_and_numbers_of_any_length(run: Path) -> None:
    for name in ("step-abc", "step-²²²²²²", f"step-{'9' * 200}", "step-"):
        (run / "samples" / f"{name}.jsonl").write_text("{}\n")
    (run / "samples" / "index.jsonl").write_text('{"step": 1e999, "groups": []}\n' + "[" * 100_000 + "\n")
    assert fovea("report", str(run)).exit_code == 0
    client = TestClient(make_app([ViewedRun(run)]), base_url="http://localhost")
    for path in ("step/0/", "step/", "curve/0/", "entries/0/"):
        end = "/1" if path == "step/" else ""
        assert client.get(f"/data/{path}{'9' * 5000}{end}").status_code == 404
    assert client.get("/data/step/0/1").status_code == 200
    for line in ('{"step": 1e999}', '{"step": "x"}', '{"step": 1, "a": 1' + "0" * 400 + "}", "[" * 100_000):
        (run / "metrics.jsonl").write_text(line + "\n")
        assert "metrics.jsonl line 1 is" in refused("report", str(run))


def test_a_broken_size_of_microbatches_is_named(tmp_path: Path) -> None:
    for text in ("", "{", "[]", '{"setting": 1}', '{"setting": "x", "limit": 1}', '{"setting": 1, "limit": 1e999}'):
        (tmp_path / "microbatches.json").write_text(text)
        with pytest.raises(DataError, match=r"\bmicrobatches\.json\b"):
            left_limit(tmp_path)


def test_a_checkpoint_of_other_things_than_its_files_is_damaged(run: Path, tmp_path: Path) -> None:
    checkpoint = run / "checkpoints" / "step-1"
    private = tmp_path / "private"
    private.write_bytes(PRIVATE)
    (checkpoint / "link").symlink_to(private)
    assert "leads out of" in str(damage(checkpoint))
    (checkpoint / "link").unlink()
    os.mkfifo(checkpoint / "fifo")
    assert "neither a file nor a folder" in str(damage(checkpoint))
    (checkpoint / "fifo").unlink()
    (checkpoint / "manifest.json").write_text('{"/dev/zero": {"bytes": 0, "sha256": ""}}')
    assert "leads out of" in str(damage(checkpoint))
    for text in ("", "[]", "{}", "[" * 100_000):
        (checkpoint / "state.json").write_text(text)
        write_manifest(checkpoint)
        with pytest.raises(DataError):
            read_checkpoint(checkpoint)
