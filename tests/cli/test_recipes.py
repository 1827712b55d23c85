"""Recipes by name: `fovea recipes`, and every command that takes a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fovea.cli import main as cli
from fovea.cli.texts import describe_recipe, sort_words
from fovea.config.describe import describe
from fovea.config.recipes import find_recipe, shipped_recipes
from fovea.errors import DataError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without recipes, as it is for those who installed a wheel."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_list_names_every_recipe_with_what_it_needs() -> None:
    result = CliRunner().invoke(cli.app, ["recipes"])
    assert result.exit_code == 0, result.output
    names = {path.stem for path in (ROOT / "recipes").rglob("*.yaml")}
    assert {line.split()[0] for line in result.stdout.partition("\n\n")[0].splitlines() if line[0] != " "} == names
    assert "shapes              The demo: a tiny Qwen3-VL learns" in result.stdout
    assert f"{'':<20}needs one CPU core, three minutes; no files, no network\n" in result.stdout


def test_a_recipe_is_printed_as_it_is() -> None:
    result = CliRunner().invoke(cli.app, ["recipes", "tiny"])
    assert result.stdout == (ROOT / "recipes" / "tiny.yaml").read_text(encoding="utf-8")
    unknown = CliRunner().invoke(cli.app, ["recipes", "shape"])
    assert unknown.exit_code == DataError.exit_code
    assert "shape: no recipe that comes with Fovea; there are boxes, caption, easy_vqa, " in unknown.stderr


def test_a_head_without_its_needs_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("# A recipe of mine.\nseed: 0\n")
    with pytest.raises(DataError, match="lacks a sentence or a line `# Needs: "):
        describe_recipe(file)


def test_a_name_stands_for_the_file(tmp_path: Path) -> None:
    shapes = ROOT / "recipes" / "shapes.yaml"
    assert sort_words(["shapes", "seed=1", "tiny"]) == ([shapes, ROOT / "recipes" / "tiny.yaml"], ["seed=1"])
    (tmp_path / "vqa").mkdir()
    assert find_recipe("vqa") == ROOT / "recipes" / "vqa.yaml"  # a folder of rows is not a recipe
    (tmp_path / "shapes").write_text("seed: 3\n")
    assert find_recipe("shapes") == Path("shapes")  # your own file is


def test_no_recipe_is_called_as_a_setting_or_section() -> None:
    keys = {part for each in describe() for part in (each.key, each.key.partition(".")[0])}
    assert not keys & set(shipped_recipes())


def test_commands_take_a_name() -> None:
    for words in (["config", "shapes"], ["plan", "shapes"]):
        result = CliRunner().invoke(cli.app, words)
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("word", "near"),
    [("shape", "did you mean shapes?"), ("recipes/vqa.yaml", "did you mean vqa"), ("qqq", "`fovea recipes`")],
)
def test_a_name_that_is_none_is_told_the_nearest(word: str, near: str) -> None:
    result = CliRunner().invoke(cli.app, ["train", word])
    assert result.exit_code == 2
    assert f"{word}: no such recipe; " in result.stderr
    assert near in result.stderr
