"""The check of plain English that `make lint` runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[1] / ".ci" / "english.py"


def check(path: Path, text: str) -> subprocess.CompletedProcess[str]:
    path.write_text(text, encoding="utf-8")
    return subprocess.run([sys.executable, str(CHECK), str(path)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "line",
    [
        '"""What holds connections."""',
        '"""Whether a path is a URL."""',
        '"""So that a rollout has the memory."""',
        '"""Rows. Those of this process come first."""',
        "# an engine with weights of its own reads them",
        "# it reads text alone",
        "x = f'{x} is no number; write one'",
        "# the engine is told of it",
    ],
)
def test_a_construction_is_found_with_its_line(line: str, tmp_path: Path) -> None:
    found = check(tmp_path / "module.py", f"x = 1\n{line}\n")
    assert found.returncode == 1
    assert "module.py:2: " in found.stdout


@pytest.mark.parametrize(
    "line",
    [
        '"""True if a path is a URL."""',
        "# each rank sends the log-probs of its own rows",
        "# there is no reference model, and it is no longer needed; a folder that is there is left alone",
        "x = 'types are told apart by their names'",
        "whether_of_its_own = alone = 1",
    ],
)
def test_other_sentences_and_names_are_not(line: str, tmp_path: Path) -> None:
    found = check(tmp_path / "module.py", f"x = 1\n{line}\n")
    assert (found.returncode, found.stdout) == (0, "")


def test_a_page_is_read_by_lines(tmp_path: Path) -> None:
    found = check(tmp_path / "page.md", "# Title\n\nIt reads text alone.\n")
    assert found.returncode == 1
    assert "page.md:3: 'alone' (only, by itself)" in found.stdout
