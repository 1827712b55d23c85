"""A run writes and prints no keys of its URLs, and no characters that steer a terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fovea.cli import main as cli
from fovea.config.loading import dump_config, load_config, public_settings
from fovea.config.run import Config
from fovea.metrics.progress import Progress
from fovea.report.about import CONFIG_FILE
from fovea.run.folder import open_run_folder
from fovea_gym.errors import DataError
from fovea_gym.rows.access import RowAccess
from fovea_gym.rows.readers.remote import local_copy

URL = "https://bob:hunter2@host.org/rows.parquet?version=3&X-Amz-Signature=abc123&token=t0psecret#part"


def config_of(folder: Path, **settings: object) -> Config:
    environment = {"name": "geo3k", "train_files": [URL], "test_files": ["rows.parquet"], "dev_files": None}
    return Config.model_validate(
        {"model": {"tiny": {}}, "run_dir": str(folder), "environment": environment, **settings}
    )


def test_a_run_uses_its_urls_and_writes_none_of_their_keys(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run")
    with open_run_folder(config):
        written = (tmp_path / "run" / CONFIG_FILE).read_text()
    assert "version=3" in written
    for text in (written, dump_config(config), str(public_settings(config))):
        assert not any(secret in text for secret in ("hunter2", "abc123", "t0psecret"))
    assert config.environment.train_files == (URL,)  # type: ignore[union-attr]


def test_a_resume_with_the_same_urls_is_the_same_run(tmp_path: Path) -> None:
    with open_run_folder(config_of(tmp_path / "run")):
        (tmp_path / "run" / "checkpoints" / "step-1").mkdir(parents=True)
    with open_run_folder(config_of(tmp_path / "run", resume="auto")):
        pass


def test_settings_read_back_say_which_key_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config_of(tmp_path / "run")))
    (url,) = load_config([file], []).environment.train_files  # type: ignore[union-attr]
    with pytest.raises(
        DataError, match=r"had a password or key.*add environment.train_files=\[\.\.\.\] with the whole"
    ):
        local_copy(url, "environment.train_files", RowAccess(cache_dir=tmp_path))


def test_text_of_rows_does_not_reach_the_terminal_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    progress = Progress(1, 0, True, console=Console(file=out))
    progress.print(f"row \x1b]0;title\x07 at {URL}")
    progress.stage("reading \x1b[31mred")
    assert "\x1b" not in out.getvalue()
    assert "hunter2" not in out.getvalue()
    monkeypatch.chdir(tmp_path)
    error = CliRunner().invoke(cli.app, ["train", "no\x1b[2Jrecipe.yaml"]).stderr
    assert error.startswith("error: no�[2Jrecipe.yaml: no such recipe")
