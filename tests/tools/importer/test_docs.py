"""The pages for users of other systems are complete, and what they point to is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fovea.config.elsewhere import System, systems
from fovea.tools.importer.docs import page

ROOT = Path(__file__).parents[3]
SYSTEMS = [pytest.param(system, id=system.name) for system in systems().values()]


def test_the_command_prints_a_page() -> None:
    command = [sys.executable, "-m", "fovea.tools.importer.docs", "mixtrain"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == page(systems()["mixtrain"])


@pytest.mark.parametrize("system", SYSTEMS)
def test_rows_are_whole_and_every_setting_is_on_the_page(system: System) -> None:
    text = page(system)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert {len(re.split(r"(?<!\\)\|", row)) for row in rows} == {5}
    assert [setting.theirs for setting in system.settings if f"`{setting.theirs}`" not in text] == []


@pytest.mark.parametrize("system", SYSTEMS)
def test_files_that_a_page_names_are_there(system: System) -> None:
    named = set(re.findall(r"\b((?:docs|recipes)/[\w./-]+\.(?:md|yaml))\b", page(system)))
    assert named
    assert sorted(file for file in named if not (ROOT / file).is_file()) == []


def test_the_readme_has_the_command_that_prints_the_pages() -> None:
    (row,) = [
        line for line in (ROOT / "README.md").read_text("utf-8").splitlines() if "fovea.tools.importer.docs" in line
    ]
    assert [system.name for system in systems().values() if system.name not in row.lower()] == []
