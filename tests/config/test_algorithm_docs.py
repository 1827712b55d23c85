"""docs/algorithms.md says what the names set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fovea.config.algorithm import DEFAULTS_OF
from fovea.config.base import leaves

LINES = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", DEFAULTS_OF)
def test_the_table_has_every_part_of_a_name_and_no_other(name: str) -> None:
    (row,) = [line for line in LINES if line.startswith(f"| {name} |")]
    parts = {
        f"`{key.removesuffix('.name')}={value if isinstance(value, str) else json.dumps(value)}`"
        for key, value in leaves(DEFAULTS_OF[name]).items()
    }
    cells = row.split("|")[2]
    assert {f"`{part}`" for part in cells.split("`")[1::2]} == parts
