"""The pages for users of other systems are up to date, and what they point to is there."""

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


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_page_is_up_to_date(system: System) -> None:
    command = f"python -m fovea.tools.importer.docs {system.name} > docs/from-{system.name}.md"
    made = (ROOT / "docs" / f"from-{system.name}.md").read_text(encoding="utf-8")
    assert made == page(system), f"write it anew: {command}"
    assert command in made


def test_the_command_writes_a_page() -> None:
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


def test_the_readme_leads_to_the_pages() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in systems() if f"docs/from-{name}.md" not in readme] == []
