"""Maps of answers in a run's folder, which may be a stranger's, and in the page."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from fovea.evaluation.answer import SaidMessage, SampledAnswer
from fovea.evaluation.evaluator import AnsweredRow
from fovea.evaluation.json_file import write_answers
from fovea.report.export import export
from fovea.report.held_out import MAX_CHARS
from fovea.report.maps import (
    FOLDER,
    MAX_MAPS,
    MAX_PATCHES,
    command_of,
    map_json,
    map_path,
    read_maps,
    sample_place,
    write_map,
)
from fovea.report.viewed_run import ViewedRun
from fovea.view.server import make_app
from fovea_gym.errors import DataError
from gym_tests.tables import table
from tests.report.folders import keep_map, map_of, write_answers_of, write_run
from tests.report.pages import ATTACK, Page


def test_answers_of_both_kinds_have_their_maps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", text=ATTACK)
    write_answers_of(folder, "test-final", ["3", ATTACK])
    run = ViewedRun(folder)
    assert [answer["maps"] for answer in run.step(4)["groups"][0]["answers"]] == [[], []]
    held_out, sample = map_of("test/1", ATTACK), map_of("train/0", "\\crop{1}")
    other = map_of("test/1", ATTACK, image=2)
    for one in (held_out, sample, other):
        keep_map(folder, one)
    keep_map(folder, map_of("test/0", "another answer"))
    assert run.facts()["maps"] == 4
    maps = [row["answer"]["maps"] for row in run.answers(0)["rows"]]
    assert maps[0] == []
    assert sorted(maps[1], key=lambda one: one["image"]) == [map_json(held_out), map_json(other)]
    # of several turns, the first
    assert [answer["maps"] for answer in run.step(4)["groups"][0]["answers"]] == [[map_json(sample)], []]
    page = Page(export([run], tmp_path / "out.html"))
    assert page.value("answers/0/0") == json.loads(json.dumps(run.answers(0)))
    assert page.value("step/0/4") == json.loads(json.dumps(run.step(4)))


def test_an_answer_is_known_by_its_whole_first_turn(tmp_path: Path) -> None:
    folder, long = write_run(tmp_path / "run"), "x" * (MAX_CHARS + 5)
    turns = (SaidMessage(role="assistant", text=long), SaidMessage(role="assistant", text="3"))
    answer = SampledAnswer(text="3", reward=1.0, accuracy=1.0, turns=turns)
    write_answers(folder, "test-final", [AnsweredRow(id="test/7", index=7, kind="all", answers=(answer,))])
    keep_map(folder, map_of("test/7", long))
    (row,) = ViewedRun(folder).answers(0)["rows"]
    assert len(row["answer"]["maps"]) == 1


def test_a_later_map_of_an_answer_takes_the_place_of_the_first(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    run, paths = ViewedRun(folder), set[Path]()
    for number, weights in enumerate(("step 1", "step 2")):
        path = keep_map(folder, map_of("test/0", "3", weights=weights))
        os.utime(path, ns=(number, number))
        paths.add(path)
        ((one,),) = run.maps().values()
        assert one.weights == weights
    assert len(paths) == 1


@table(
    "change",
    [
        {"falls": [[0.5, 1.0]]},
        {"falls": [[0.5, 1.0], [0.0]]},
        {"falls": [[0.5, 1.0], [0.0, "much"]]},
        {"falls": [[0.5, 1.0], [0.0, float("nan")]]},
        {"falls": None},
        {"patch_px": 0},
        {"patch_px": 1},
        {"patch_px": "32"},
        {"size": [64]},
        {"size": [64, -48]},
        {"size": [10**400, 48]},
        {"image": 0},
        {"logprob": float("inf")},
        {"answer": "x" * 300_000},
    ],
)
def test_what_is_no_map_is_one_line(change: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = write_run(tmp_path_factory.mktemp("runs") / "run")
    write_answers_of(folder, "test-final", ["3"])
    path = keep_map(folder, map_of("test/0", "3"))
    path.write_text(json.dumps({**asdict(map_of("test/0", "3")), **change}))
    answer = TestClient(make_app([ViewedRun(folder)]), base_url="http://127.0.0.1").get("/data/answers/0/0")
    assert answer.status_code == 422
    assert str(path) in answer.json()["error"]
    assert "delete" in answer.json()["error"]


@table("content", ["", "[]", "3", '{"id": 3}', "[" * 100_000])
def test_other_content_is_no_map(content: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("run")
    (folder / FOLDER).mkdir()
    (folder / FOLDER / "a.json").write_text(content)
    with pytest.raises(DataError, match="holds no map"):
        read_maps(folder)


def test_a_link_out_of_the_run_is_not_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / FOLDER).mkdir()
    write_map(tmp_path / "elsewhere.json", map_of("test/0", "3"))
    (folder / FOLDER / "a.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(DataError, match="leads out of"):
        read_maps(folder)


def test_so_many_maps_are_read_and_no_more(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for number in range(MAX_MAPS + 3):
        keep_map(folder, map_of(f"test/{number}", "3"))
    assert len(read_maps(folder)) == ViewedRun(folder).facts()["maps"] == MAX_MAPS


def test_a_map_has_at_most_so_many_patches() -> None:
    side = int(MAX_PATCHES**0.5)
    falls = ((0.0,) * side,) * side
    assert map_of("test/0", "3", size=(side, side), patch_px=1, falls=falls).size == (side, side)
    with pytest.raises(ValueError, match="no 33 x 32 patches"):
        map_of("test/0", "3", size=(side, side + 1), patch_px=1, falls=(*falls, falls[0]))


def test_the_file_is_of_the_row_and_the_answer() -> None:
    first, second = (map_path(Path("run"), "test", 3, map_of("test/3", answer)) for answer in ("3", "\ud800"))
    assert first.name.startswith("test-000003-")
    assert first != second


def test_the_command_is_safe_in_a_shell() -> None:
    assert command_of("runs/shapes") == "fovea saliency runs/shapes"
    assert command_of("a b; rm *'") == """fovea saliency 'a b; rm *'"'"''"""
    assert command_of("a\x1b[2J") == command_of("") == ""


def test_places_of_samples() -> None:
    place = sample_place("50:1:3")
    assert place is not None
    assert (place.step, place.group, place.answer) == (50, 1, 3)
    assert sample_place("test-final") is sample_place("1:2") is sample_place("1:2:-3") is None
