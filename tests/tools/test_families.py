"""The table of tested model types: the committed page is current, and what it says holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fovea.cli.main import app
from fovea_tools.families.table import COLUMNS, TestedType, as_page, check_types, model_types

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
