"""The table of `python -m benchmarks.layout`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.layout import ENGINE, LOSS, counts, files_that_name, is_met, isinstance_of_engines, main, texts_of

ROOT = Path(__file__).parents[2]
SIZES = ("lines", "files with code", "names at the top", "settings")
"""Counts that are goals; the others are rules."""


def test_every_rule_is_held_and_every_count_is_of_something(capsys: pytest.CaptureFixture[str]) -> None:
    found = list(counts())
    rules = [each for each in found if not any(size in each.name for size in SIZES)]
    assert [each.name for each in rules if not is_met(each)] == []
    assert [each.name for each in found if each.value == 0] == [
        "imports of a later package",
        "imports of a higher room",
    ]
    main()
    printed = capsys.readouterr().out
    assert all(each.name in printed and f"{each.value:,}" in printed for each in found)


def test_files_to_touch_are_counted_in_the_code() -> None:
    code = texts_of(ROOT / "fovea")
    assert "fovea/train/loss.py" in files_that_name(LOSS, code)
    assert {"fovea/config/backends.py", "fovea/rollout/sglang/"} <= files_that_name(ENGINE, code)
    more = {**code, "fovea/other.py": "from fovea.algorithms.policy_loss import cispo_loss"}
    assert files_that_name(LOSS, more) - files_that_name(LOSS, code) == {"fovea/other.py"}


def test_isinstance_on_engines_is_found_under_another_name() -> None:
    """`wiring/engine.py` imports `StreamedEngine as StreamedSettings`."""
    assert "fovea/wiring/engine.py" in isinstance_of_engines("fovea")
