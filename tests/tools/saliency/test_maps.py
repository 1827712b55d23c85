"""Maps of answers in a run's folder, which may be a stranger's, and their page."""

from __future__ import annotations

import json
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import pytest

from fovea_gym.errors import DataError
from fovea_tools.saliency.maps import (
    FOLDER,
    MAX_MAPS,
    MAX_PATCHES,
    AnswerMap,
    map_path,
    read_maps,
    sample_place,
    write_map,
)
from fovea_tools.saliency.page import write_page
from gym_tests.tables import table
from tests.report.pages import ATTACK


def map_of(
    task_id: str,
    answer: str,
    *,
    image: int = 1,
    weights: str = "step-5",
    size: tuple[int, int] = (64, 48),
    patch_px: int = 32,
    falls: tuple[tuple[float, ...], ...] = ((0.5, 1.0), (0.0, -2.0)),
) -> AnswerMap:
    """A map of a picture in four patches, of which the lower two are cut."""
    return AnswerMap(
        id=task_id,
        question="How many?",
        answer=answer,
        image=image,
        weights=weights,
        logprob=-0.25,
        patch_px=patch_px,
        size=size,
        falls=falls,
    )


def keep_map(folder: Path, made: AnswerMap) -> Path:
    """Write a map into a run's folder; returns its file."""
    path = map_path(folder, "test", 0, made)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_map(path, made)
    return path


def test_a_later_map_of_an_answer_takes_the_place_of_the_first(tmp_path: Path) -> None:
    paths = {keep_map(tmp_path, map_of("test/0", "3", weights=weights)) for weights in ("step 1", "step 2")}
    ((path, found),) = read_maps(tmp_path).items()
    assert paths == {path}
    assert found.weights == "step 2"


def test_the_page_shows_every_map_beside_its_picture(tmp_path: Path) -> None:
    kept = [keep_map(tmp_path, map_of(f"test/{row}", answer)) for row, answer in enumerate(("a red box", "3"))]
    page = write_page(tmp_path)
    assert page == tmp_path / "saliency" / "index.html"
    text = page.read_text(encoding="utf-8")
    for path in kept:
        assert f'src="{path.stem}.png"' in text
    assert "test/1, picture 1, step-5" in text
    assert "How many?\n<b>a red box</b>" in text
    assert "log-prob -0.25, up to 1 lower with 32 px hidden" in text


def test_text_of_a_stranger_is_shown_as_text(tmp_path: Path) -> None:
    keep_map(tmp_path, map_of(ATTACK, f"{ATTACK}\ud800", weights=ATTACK))
    text = write_page(tmp_path).read_text(encoding="utf-8")
    assert "<script" not in text
    assert text.count(escape(ATTACK)) == 3
    assert "default-src 'none'" in text


def test_no_link_in_the_place_of_the_page_is_written_through(tmp_path: Path) -> None:
    keep_map(tmp_path / "run", map_of("test/0", "3"))
    (tmp_path / "run" / FOLDER / "index.html").symlink_to(tmp_path / "elsewhere.html")
    assert not write_page(tmp_path / "run").is_symlink()
    assert not (tmp_path / "elsewhere.html").exists()


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
def test_what_is_no_map_is_named(change: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("run")
    path = keep_map(folder, map_of("test/0", "3"))
    path.write_text(json.dumps({**asdict(map_of("test/0", "3")), **change}))
    with pytest.raises(DataError, match="delete") as refused:
        write_page(folder)
    assert str(path) in str(refused.value)


@table("content", ["", "[]", "3", '{"id": 3}', "[" * 100_000])
def test_other_content_is_no_map(content: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("run")
    (folder / FOLDER).mkdir()
    (folder / FOLDER / "a.json").write_text(content)
    with pytest.raises(DataError, match="is not a valid map"):
        read_maps(folder)


def test_a_link_out_of_the_run_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / FOLDER).mkdir(parents=True)
    write_map(tmp_path / "elsewhere.json", map_of("test/0", "3"))
    (folder / FOLDER / "a.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(DataError, match="leads out of"):
        read_maps(folder)


def test_so_many_maps_are_read_and_no_more(tmp_path: Path) -> None:
    for number in range(MAX_MAPS + 3):
        keep_map(tmp_path, map_of(f"test/{number}", "3"))
    assert len(read_maps(tmp_path)) == MAX_MAPS


def test_a_map_has_at_most_so_many_patches() -> None:
    side = int(MAX_PATCHES**0.5)
    falls = ((0.0,) * side,) * side
    assert map_of("test/0", "3", size=(side, side), patch_px=1, falls=falls).size == (side, side)
    with pytest.raises(ValueError, match="falls are not 33 x 32 patches"):
        map_of("test/0", "3", size=(side, side + 1), patch_px=1, falls=(*falls, falls[0]))


def test_the_file_is_of_the_row_and_the_answer() -> None:
    first, second = (map_path(Path("run"), "test", 3, map_of("test/3", answer)) for answer in ("3", "\ud800"))
    assert first.name.startswith("test-000003-")
    assert first != second


def test_places_of_samples() -> None:
    place = sample_place("50:1:3")
    assert place is not None
    assert (place.step, place.group, place.answer) == (50, 1, 3)
    assert sample_place("test-final") is sample_place("1:2") is sample_place("1:2:-3") is None
