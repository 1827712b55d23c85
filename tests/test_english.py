"""The check of plain English that `make lint` runs."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

CHECK = Path(__file__).parents[1] / ".ci" / "english.py"


def check(path: Path, text: str) -> subprocess.CompletedProcess[str]:
    path.write_text(text, encoding="utf-8")
    return subprocess.run([sys.executable, str(CHECK), str(path)], capture_output=True, text=True, check=False)


FAULTY = [
    '"""What holds connections."""',
    '"""Whether a path is a URL."""',
    '"""So that a rollout has the memory."""',
    '"""Rows. Those of this process come first."""',
    "# an engine with weights of its own reads them",
    "# it reads text alone",
    "x = f'{x} is no number; write one'",
    "# the engine is told of it",
]
SOUND = [
    '"""True if a path is a URL."""',
    "# each rank sends the log-probs of its own rows",
    "# there is no reference model, and it is no longer needed; a folder that is there is left alone",
    "x = 'types are told apart by their names'",
    "whether_of_its_own = alone = 1",
]


def test_every_faulty_construction_is_found_with_its_line_and_other_sentences_are_not(tmp_path: Path) -> None:
    lines = [line for pair in zip_longest(FAULTY, SOUND, fillvalue="x = 1") for line in pair]
    found = check(tmp_path / "module.py", "\n".join(lines))
    assert found.returncode == 1
    named = map(int, re.findall(r"module\.py:(\d+): ", found.stdout))
    assert sorted(named) == list(range(1, 2 * len(FAULTY), 2))
    found = check(tmp_path / "module.py", "\n".join(SOUND))
    assert (found.returncode, found.stdout) == (0, "")


def test_a_page_is_read_by_lines(tmp_path: Path) -> None:
    found = check(tmp_path / "page.md", "# Title\n\nIt reads text alone.\n")
    assert found.returncode == 1
    assert "page.md:3: 'alone' (only, by itself)" in found.stdout
