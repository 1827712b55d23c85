"""Commands, checks and hints of the tools by entry points, what `fovea` says without them, and tested model types."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fovea.cli.main import app
from fovea_tools.families.table import COLUMNS, TestedType, as_page, check_types, model_types
from gym_tests.tables import table

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "tools" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
POINTS = {group: dict(points) for group, points in PROJECT["entry-points"].items()}
COMMANDS = list(POINTS["fovea.commands"])


@table(("group", "name"), [(group, name) for group, points in POINTS.items() for name in points])
def test_every_entry_point_is_there(group: str, name: str) -> None:
    assert EntryPoint(name, POINTS[group][name], group).load() is not None


def test_help_lists_each_command_by_the_first_line_of_its_own_help() -> None:
    listed = dict(
        line.split(maxsplit=1)
        for line in CliRunner().invoke(app, ["--help"]).stdout.partition("Commands:\n")[2].splitlines()
        if line.startswith("  ") and len(line.split()) > 1
    )
    for name in COMMANDS:
        usage, _, about, *_ = CliRunner().invoke(app, [name, "--help"]).stdout.splitlines()
        assert f" {name} " in usage
        assert listed[name] == about.strip()


def test_help_imports_no_command_of_the_tools() -> None:
    code = "import sys; from fovea.cli.main import app; app(['--help'], standalone_mode=False); "
    command = [sys.executable, "-c", code + "sys.exit('fovea_tools' in sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "  plan  " in done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed packages but the tools."""
    folder = tmp_path_factory.mktemp("packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("fovea_rl_tools", "_editable_impl_fovea_rl_tools")):
            (folder / path.name).symlink_to(path)
    return folder


def without_tools(packages: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command `fovea` where only fovea and its gym are installed."""
    # -S: no folder of packages but these
    path = os.pathsep.join(map(str, (ROOT, ROOT / "gym", packages)))
    command, env = [sys.executable, "-S", "-m", "fovea", *words], {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=packages, env=env, timeout=120)


@pytest.mark.parametrize(
    ("typed", "more"),
    [
        *(("plan", "shapes"), ("data", "vqa --help"), ("saliency", "runs/shapes")),
        *(("doctor --families", ""), ("doctor --gpu", "--cpu")),
    ],
)
def test_without_the_tools_a_line_installs_them(typed: str, more: str, packages: Path) -> None:
    done = without_tools(packages, *typed.split(), *more.split())
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    installs = f"pip install -e '{ROOT / 'tools'}'"
    assert line == f"error: fovea {typed} comes with the package fovea-rl-tools, which is not installed: {installs}"


def test_without_the_tools_help_lists_all_commands_and_hints_are_silent(packages: Path) -> None:
    with_them = CliRunner().invoke(app, ["--help"], prog_name="python -m fovea").stdout
    assert without_tools(packages, "--help").stdout.split() == with_them.split()
    unknown = without_tools(packages, "train", "shapes", "data.train_batch_size=3")
    assert unknown.returncode == 2
    assert "data.train_batch_size: no such setting" in unknown.stderr
    assert "verl" not in unknown.stderr


PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def committed() -> list[TestedType]:
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    return [TestedType(model_type=name, cells=tuple(cells)) for name, *cells in rows]


def test_the_committed_table_has_every_type_and_all_pass() -> None:
    rows = committed()
    assert as_page(rows) == PAGE.read_text()
    assert tuple(row.model_type for row in rows) == model_types()
    assert all(row.passed and len(row.cells) == len(COLUMNS) for row in rows)
    assert len(rows) >= 14
    assert sum(row.cells[0] == "auto" for row in rows) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("row", committed(), ids=lambda row: row.model_type)
def test_a_row_is_what_the_checks_find(row: TestedType) -> None:
    assert list(check_types([row.model_type], print)) == [row]


def test_an_unknown_type_is_named() -> None:
    result = CliRunner().invoke(app, ["doctor", "--families", "llama"])
    assert result.exit_code == 2
    assert "--families llama: not a tested model type; choose from qwen2_vl, " in result.output
