"""Seeded faults of a small package: which there are, that each is on by its number, and which tests reach it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.mutants import drawn, found_again, mutants_of, write_switches

SOURCE = '''
"""A docstring, and a number of the import: 3."""
LIMIT = 3


@jit
def compiled(x):
    return x + 1


def clipped(x: int, low: int = 0) -> int:
    seen.append(x)
    if x < low:
        raise ValueError(f"{x - 1} is below")
    return (
        x + 2  # in two lines
        if not low
        else LIMIT
    )
'''
RUN = """
import builtins, small
small.jit = None
results = []
for number in range({count}):
    builtins._mutant_.active = number
    small.seen = []
    results.append((small.clipped(5), small.seen))
print(results)
"""


def package(folder: Path) -> Path:
    (folder / "small").mkdir()
    (folder / "small/__init__.py").write_text("jit = lambda f: f\nseen = []\n" + SOURCE)
    return folder


def test_what_changes(tmp_path: Path) -> None:
    found = {(each.original.split("  #")[0], each.mutated) for each in mutants_of(package(tmp_path), "small")}
    assert {("seen.append(x)", "None"), ("x < low", "x <= low"), ("x + 2", "x - 2"), ("2", "3")} <= found
    assert not any("3." in mutated or "jit" in original for original, mutated in found)
    assert "clipped" in {each.function for each in mutants_of(tmp_path, "small")}
    assert "compiled" not in {each.function for each in mutants_of(tmp_path, "small")}
    assert len([each for each in mutants_of(tmp_path, "small") if each.original == "3"]) == 0, "that of the import"


def test_each_is_on_by_its_number_and_its_tests_are_noted(tmp_path: Path) -> None:
    mutants = [each for each in mutants_of(package(tmp_path), "small") if each.mutated in ("None", "x - 2", "x <= low")]
    mutants = [each for each in mutants if each.original != "x + 2" or each.mutated == "x - 2"]
    taken = drawn(mutants, 3, seed=1)
    assert len(taken) == 3
    assert taken == drawn(mutants, 3, seed=1)
    write_switches(tmp_path, "small", taken)
    (tmp_path / "hits").mkdir()
    environment = {**os.environ, "FOVEA_MUTANT_HITS": str(tmp_path / "hits"), "PYTEST_CURRENT_TEST": "a.py::t (call)"}
    program = RUN.format(count=len(taken) + 1)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    results = eval(done.stdout)  # our own print
    assert results[-1] == (7, [5]), "none is on"
    for mutant, result in zip(taken, results, strict=False):
        expected = {"seen.append(x)": (7, []), "x < low": (7, [5])}.get(mutant.original, (None, [5]))
        assert result == (expected if mutant.mutated != "x - 2" else (3, [5])), mutant
    (file,) = (tmp_path / "hits").iterdir()
    assert file.read_text().splitlines() == [f"{number}\ta.py::t (call)" for number in range(3)]


def test_a_mutant_is_found_again_where_lines_have_moved(tmp_path: Path) -> None:
    before = mutants_of(package(tmp_path), "small")
    file = tmp_path / "small/__init__.py"
    file.write_text("# a new line\n" + file.read_text().replace("x < low", "low > x"))
    found = found_again(before, mutants_of(tmp_path, "small"))
    assert [each.line for each in found if each] == [each.line + 1 for each in before if "x < low" not in each.original]
