"""`benchmarks.distance`: what it counts in a step, in ways given by hand, and of the tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import distance
from benchmarks.distance import Recorder, main, needed, way

PAGE = (Path(__file__).parents[2] / "docs/step.md").read_text(encoding="utf-8")
MOST_LINKED, MOST_ENTERED = 22, 113
WITHOUT_CODE = {"fovea/run/context.py"}
"""Records, in which nothing runs."""
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


def test_of_several_ways_the_shortest_is_counted() -> None:
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


def test_all_distances_of_the_tree_are_counted_and_the_list_of_the_page_is_true(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--list"]) == 0, capsys.readouterr().out
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
    assert linked - entered <= WITHOUT_CODE
