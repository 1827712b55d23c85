"""Pictures of the page show what they are named after, in files that a page of docs can hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from starlette.testclient import TestClient

from benchmarks.view_browser import make_run
from benchmarks.view_picture import HEIGHT, WIDTH, take
from fovea.report.viewed_run import ViewedRun
from fovea.view.server import make_app
from tests.chromium import open_browser
from tests.report.folders import write_run

DOCS = Path(__file__).parents[2] / "docs"
MAX_BYTES = 150_000


@pytest.mark.browser
def test_pictures_of_one_run_and_of_two(tmp_path: Path) -> None:
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "other", recorded=(1, 5))
    with open_browser() as browser:
        taken = take(browser, [one], tmp_path)
        assert browser.evaluate("document.querySelectorAll('.token').length") > 0
        assert [file.name for file in taken] == ["view_overview.png", "view_curves.png", "view_samples.png"]
        compared = take(browser, [one, other], tmp_path, step=4, group=1)
        place = browser.evaluate("[...document.querySelectorAll('.group .place')].map((each) => each.textContent)")
    assert place == ["one · step 4 · count · train/1", "other · step 5 · count · train/1"]
    assert [file.name for file in compared] == ["view_curves_compared.png", "view_compared.png"]
    assert compared[0].read_bytes() != taken[1].read_bytes(), "the curves of two runs"
    for file in {*taken, *compared}:
        picture = Image.open(file).convert("RGB")
        assert picture.size == (WIDTH, HEIGHT)
        assert len(picture.getcolors(WIDTH * HEIGHT) or ()) > 8, "a page that was drawn"
        assert file.stat().st_size < MAX_BYTES


def test_the_pictures_of_the_page_in_docs_are_small() -> None:
    shown = [DOCS / f"view_{name}.png" for name in ("overview", "curves", "samples", "compared")]
    text = (DOCS / "view.md").read_text(encoding="utf-8")
    for file in shown:
        assert f"({file.name})" in text
        assert file.stat().st_size < MAX_BYTES


def test_the_page_has_the_steps_and_groups_of_a_made_up_run(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 20)
    client = TestClient(make_app([ViewedRun(tmp_path / "run")]), base_url="http://127.0.0.1")
    assert len(client.get("/data/step/0/20").json()["groups"]) == 4
    assert client.get("/data/curve/0/7").status_code == 200
