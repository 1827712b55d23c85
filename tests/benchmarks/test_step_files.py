"""The reading list of docs/step.md: short, and of files that a step enters."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.step_files import files_of_a_step

PAGE = (Path(__file__).parents[2] / "docs/step.md").read_text(encoding="utf-8")
MOST_LINKED, MOST_ENTERED = 22, 110
WITHOUT_CODE = {"gym/fovea_gym/environments/base.py", "fovea/run/context.py"}
"""Protocols and records, in which nothing runs."""


def test_the_list_of_the_page_is_short_and_true() -> None:
    linked = set(re.findall(r"\]\(\.\./(fovea/[\w/]+\.py)\)", PAGE))
    entered = files_of_a_step()
    assert len(linked) <= MOST_LINKED
    assert len(entered) <= MOST_ENTERED
    assert linked - entered.keys() <= WITHOUT_CODE
    assert "take_step" in entered["fovea/loop.py"]
