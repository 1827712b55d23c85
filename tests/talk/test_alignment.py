"""The alignment of SmolVL's vision tower learns, and repeats itself; the tower that ships reads unseen pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

pytest.importorskip("easy_vqa", reason="the package easy-vqa is not installed (the extra talk)")
pytest.importorskip("gguf", reason="the package gguf is not installed (the extra talk)")

from examples.talk.alignment import read_share
from examples.talk.folder import read_tower
from examples.talk.language import package_folder
from fovea.cli.main import app
from fovea_gym.errors import MissingExtraError
from fovea_tools.data_sets.easy_vqa import split_pictures

MIN_READ_SHARE = 0.8
"""Chance is a twenty-fourth; colours alone would be a third. The language model reads less than the tower tells it."""

pytestmark = [pytest.mark.slow, pytest.mark.long]
try:
    package_folder()
except MissingExtraError as error:
    pytest.skip(str(error), allow_module_level=True)


def trained(out: Path, *options: str) -> tuple[dict[str, torch.Tensor], str]:
    result = CliRunner().invoke(app, ["model", "smolvl-tower", "--out", str(out), "--images", "200", *options])
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == [str(out)]
    return load_file(out), result.stderr


def test_equal_settings_give_equal_towers_and_it_learns(tmp_path: Path) -> None:
    first, said = trained(tmp_path / "first", "--steps", "100", "--caption-steps", "10")
    again, _ = trained(tmp_path / "again", "--steps", "100", "--caption-steps", "10", "--quiet")
    other, _ = trained(tmp_path / "other", "--steps", "1", "--caption-steps", "1", "--seed", "1")
    assert first.keys() == again.keys() == other.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    losses = [float(line.split("loss ")[1].split()[0]) for line in said.splitlines() if line.startswith("tower: step")]
    assert len(losses) == 2
    assert losses[1] < 0.9 * losses[0]
    assert first["blocks.0.mlp.fc1.weight"].dtype == torch.float16


def test_the_language_model_says_what_the_shipped_tower_sees_of_pictures_that_neither_has_seen() -> None:
    assert read_share(read_tower(None), split_pictures(0)["test"][:200]) > MIN_READ_SHARE
