"""What is counted of the tree: distances in a step, rules of its layout, seeded faults, names of other packages."""

from __future__ import annotations

import os
import re
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from benchmarks import distance, layout, names
from benchmarks.distance import Recorder, needed, way
from benchmarks.layout import ENGINE, LOSS, counts, files_that_name, is_met, isinstance_of_engines, texts_of
from benchmarks.mutants import drawn, found_again, mutants_of, write_switches
from benchmarks.names import Source, missing, uses_of
from tests.runs import ROOT, run_program

MOST_LINKED, MOST_ENTERED = 22, 113
STEP = ("loop.py", "take_step")


def given(**stacks: tuple[tuple[str, str], ...]) -> Recorder:
    recorder = Recorder()
    for function, stack in stacks.items():
        recorder.stacks[function].add(stack)
    return recorder


def test_a_way_goes_up_to_the_call_that_both_functions_share_and_down() -> None:
    draw = (STEP, ("draw.py", "draw"), ("reward.py", "score"))
    learn = (STEP, ("loop.py", "learn"), ("draw.py", "again"), ("advantage.py", "grpo"))
    text, listed = way(given(score=draw, grpo=learn), "score", "grpo")
    assert text == "4 changes of file, 4 files, 6 frames"
    assert [each.partition(": ")[2] for each in listed] == ["score", "draw", "take_step", "learn", "again", "grpo"]
    assert way(given(take_step=(STEP,), grpo=learn), "take_step", "grpo")[0] == "2 changes of file, 3 files, 4 frames"
    # of several ways the shortest is counted
    recorder = given(made=(STEP, ("a.py", "made")), used=(STEP, ("b.py", "used")))
    recorder.stacks["used"].add((STEP, ("loop.py", "used")))
    assert way(recorder, "made", "used")[0] == "1 changes of file, 2 files, 3 frames"


def test_a_name_that_is_gone_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = given(made=(STEP, ("a.py", "made")), used=(("b.py", "used"),))
    assert way(outside, "made", "used") == ("GONE: used does not run within take_step; put its successor into WAYS", [])
    assert way(outside, "renamed", "made")[0].startswith("GONE: renamed does")
    (tmp_path / "needed.txt").write_text("fovea/loop.py\nfovea/renamed.py\n")
    monkeypatch.setattr(distance, "NEEDED", tmp_path / "needed.txt")
    assert needed(["fovea/loop.py"]) == ("GONE: fovea/renamed.py; put their successors into needed.txt", [])


def test_all_distances_are_counted_and_the_list_of_the_page_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    assert distance.main(["--list"]) == 0, capsys.readouterr().out
    lines = capsys.readouterr().out.splitlines()
    assert [line[:33].rstrip() for line in lines if not line.startswith(" ")] == [
        *("reward -> advantage", "log-prob -> loss", "weights -> engine, one process", "take_step -> clipped_loss"),
        *("files entered", "of these needed by a reader"),
        *("record classes of an answer", "declarations of a policy method"),
    ]
    # the user's function has run in a thread of its own, its grader in a task on a loop in another
    first = lines[1 : lines.index("    fovea/loop.py: take_step")]
    assert first[0].strip() == "reward.py: users_reward"
    assert "    fovea/rollout/collect.py: collect" in first
    # the reading list of the page is short, and of files that a step enters
    start = next(n for n, line in enumerate(lines) if line.startswith("files entered"))
    entered = {line.strip() for line in lines[start + 1 : start + 1 + int(lines[start].split()[-1])]}
    linked = set(re.findall(r"\]\(\.\./(fovea/[\w/]+\.py)\)", PAGE))
    assert len(linked) <= MOST_LINKED
    assert len(entered) <= MOST_ENTERED
    assert linked - entered <= {"fovea/run/context.py"}, "but records, in which nothing runs"


PAGE = (ROOT / "docs/step.md").read_text(encoding="utf-8")
SIZES = ("lines", "files with code", "names at the top", "settings")
"""Counts that are goals; the others are rules."""


def test_every_rule_is_held_and_every_count_is_of_something(capsys: pytest.CaptureFixture[str]) -> None:
    found = list(counts())
    rules = [each for each in found if not any(size in each.name for size in SIZES)]
    assert [each.name for each in rules if not is_met(each)] == []
    zeros = [each.name for each in found if each.value == 0]
    assert zeros == ["imports of a later package", "imports of a higher room"]
    layout.main()
    printed = capsys.readouterr().out
    assert all(each.name in printed and f"{each.value:,}" in printed for each in found)


def test_files_to_touch_are_counted_in_the_code() -> None:
    code = texts_of(ROOT / "fovea")
    assert "fovea/train/loss.py" in files_that_name(LOSS, code)
    assert {"fovea/config/backends.py", "fovea/rollout/sglang/"} <= files_that_name(ENGINE, code)
    more = {**code, "fovea/other.py": "from fovea.algorithms.policy_loss import cispo_loss"}
    assert files_that_name(LOSS, more) - files_that_name(LOSS, code) == {"fovea/other.py"}
    # also isinstance under another name: it imports `StreamedEngine as StreamedSettings`
    assert "fovea/wiring/engine.py" in isinstance_of_engines("fovea")


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
    mutants = mutants_of(package(tmp_path), "small")
    found = {(each.original.split("  #")[0], each.mutated) for each in mutants}
    assert {("seen.append(x)", "None"), ("x < low", "x <= low"), ("x + 2", "x - 2"), ("2", "3")} <= found
    assert not any("3." in mutated or "jit" in original for original, mutated in found)
    functions = {each.function for each in mutants}
    assert ("clipped" in functions, "compiled" in functions) == (True, False)
    assert [each for each in mutants if each.original == "3"] == [], "that of the import"


def test_each_is_on_by_its_number_and_its_tests_are_noted(tmp_path: Path) -> None:
    mutants = [each for each in mutants_of(package(tmp_path), "small") if each.mutated in ("None", "x - 2", "x <= low")]
    mutants = [each for each in mutants if each.original != "x + 2" or each.mutated == "x - 2"]
    taken = drawn(mutants, 3, seed=1)
    assert (len(taken), taken) == (3, drawn(mutants, 3, seed=1))
    write_switches(tmp_path, "small", taken)
    (tmp_path / "hits").mkdir()
    environment = {**os.environ, "FOVEA_MUTANT_HITS": str(tmp_path / "hits"), "PYTEST_CURRENT_TEST": "a.py::t (call)"}
    done = run_program([sys.executable, "-c", RUN.format(count=len(taken) + 1)], environment, cwd=tmp_path)
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


LACKING = {
    *("engine.core.Engine takes no sed", "engine.core.Settings takes no size", "engine.core.stop takes no hard"),
    *("no name gone in engine.core", "no module engine.nowhere"),
}
RELEASE = {
    "engine/__init__.py": "from engine.core import Engine\n_LAZY = ['Late']\n",
    "engine/core.py": (
        "from dataclasses import dataclass\n"
        "class Engine:\n    def __init__(self, model, *, seed=0): ...\n"
        "@dataclass\nclass Settings:\n    model: str\n    seed: int = 0\n"
        "class Open(Settings): ...\n"
        "def start(model, **rest): ...\n"
        "def stop(wait=True): ...\n"
    ),
    "engine/tools/__init__.py": "",
    "engine/tools/free.py": "FREE = 1\n",
}
USER = """
from engine import Engine, Late, tools
from engine.core import Engine as Core, Open, Settings, start, stop, gone
from engine.tools.free import FREE
from engine.nowhere import x

Core(model=1, sed=2)
Engine(seed=1)
Settings(model=1, size=2)
Open(anything=1)
start(1, anything=2)
stop(wait=False, hard=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in RELEASE.items():
        file = tmp_path / "release" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "user.py").write_text(USER)
    return tmp_path


@pytest.fixture(params=["folder", "wheel"])
def release(folder: Path, request: pytest.FixtureRequest) -> Source:
    if request.param == "folder":
        return folder / "release"
    wheel = folder / "engine-1.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for name, text in RELEASE.items():
            file.writestr(name, text)
    return zipfile.Path(wheel)


def test_what_a_release_lacks_is_found(folder: Path, release: Source) -> None:
    found = {said for use in uses_of("engine", folder / "code") if (said := missing(use, release)) is not None}
    assert found == LACKING


def test_every_name_that_fovea_takes_of_torch_is_in_the_installed_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert names.main(["torch", str(Path(torch.__file__).parents[1])]) == 0, capsys.readouterr().out
