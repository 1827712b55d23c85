"""Maps of answers in a real browser: over their pictures, switched on and off, and the command where there is none."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fovea.evaluation.occlusion import OcclusionMap
from fovea.report.export import export
from fovea.report.held_out import write_pictures
from fovea.report.images import png_bytes
from fovea.report.samples import write_samples
from fovea.report.viewed_run import ViewedRun
from tests.chromium import Browser, open_browser
from tests.report.folders import group, image_in, keep_map, map_of, write_answers_of, write_run
from tests.view.browsing import GROUP, HOSTILE, open_page, served, text_of

pytestmark = pytest.mark.browser

PICTURE = Image.new("RGB", (64, 48), (200, 30, 30))
"""That of `write_run`."""
BUTTONS = "[...document.querySelectorAll('button.map')]"
COVERS = "document.querySelectorAll('.cover').length"
SAMPLE = "samples?step=4&group=0"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with a map of the first answer of a sample, and of the first of two held-out rows."""
    folder = write_run(tmp_path / "run")
    write_answers_of(folder, "test-final", ["3", "4"])
    write_pictures(folder, "test", {f"test/{row}": [png_bytes(PICTURE)] for row in range(2)})
    keep_map(folder, map_of("train/0", "\\crop{1}"))
    keep_map(folder, map_of("test/0", "3"))
    return folder


def pixels_of(browser: Browser, selector: str, folder: Path) -> np.ndarray:
    """What is on the screen in the place of an element."""
    browser.screenshot(folder / "page.png", whole=False)
    box = browser.evaluate(f"document.querySelector({selector!r}).getBoundingClientRect().toJSON()")
    left, top, right, bottom = (round(box[side]) for side in ("left", "top", "right", "bottom"))
    shown = Image.open(io.BytesIO((folder / "page.png").read_bytes())).convert("RGB")
    return np.asarray(shown.crop((left, top, right, bottom)), np.int64)


@pytest.mark.smoke
@pytest.mark.parametrize("dark", [False, True])
def test_a_map_lies_over_its_picture(browser: Browser, folder: Path, tmp_path: Path, dark: bool) -> None:
    made = map_of("train/0", "\\crop{1}")
    drawn = OcclusionMap(logprob=-0.25, falls_RC=np.array(made.falls, np.float32), side_px=32).over(PICTURE)
    page = export([ViewedRun(folder)], tmp_path / "out.html")
    with served(folder) as address:
        for start in (address, page.as_uri()):
            open_page(browser, f"{start}#{SAMPLE}", "document.querySelector('.images img')?.naturalWidth", dark=dark)
            browser.evaluate("document.querySelectorAll('.mark').forEach((mark) => mark.remove())")
            assert browser.evaluate(COVERS) == 0
            browser.evaluate(f"{BUTTONS}[0].click()")
            seen_YXC = pixels_of(browser, ".images img", tmp_path)
            height, width, _ = seen_YXC.shape
            expected_YXC = np.asarray(drawn.resize((width, height), Image.Resampling.NEAREST))
            middles = [(y * height // 48, x * width // 64) for y in (16, 40) for x in (16, 48)]
            for middle in middles:
                # the page takes the colour by how bright it looks, the PNG by the mean of the channels
                assert seen_YXC[middle] == pytest.approx(expected_YXC[middle], abs=10), middle
            assert "log-prob \u22120.25, up to 1 lower · step-5" in text_of(browser, ".note")
            browser.evaluate(f"{BUTTONS}[0].click()")
            assert browser.evaluate(COVERS) == 0
            assert browser.evaluate("document.querySelectorAll('.note').length") == 0
            assert browser.problems == []


def test_an_answer_without_a_map_shows_the_command(browser: Browser, folder: Path) -> None:
    with served(folder) as address:
        open_page(browser, f"{address}#{SAMPLE}", GROUP)
        browser.evaluate(f"{BUTTONS}[0].click()")
        browser.evaluate(f"{BUTTONS}[1].click()")
        assert browser.evaluate(COVERS) == 0, "one answer at a time"
        assert browser.evaluate(f"{BUTTONS}.map((each) => each.ariaPressed)") == ["false", "true"]
        assert text_of(browser, ".command code") == f"fovea saliency {folder} --recorded 4:1:2"
        browser.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        browser.evaluate("document.querySelector('.command button').click()")
        browser.wait_for("document.querySelector('.command button').textContent === 'copied'")
        open_page(browser, f"{address}#held-out", f"{BUTTONS}.length === 2")
        browser.evaluate(f"{BUTTONS}[1].click()")
        assert text_of(browser, ".command code") == f"fovea saliency {folder} --recorded test-final --row 1"
        assert browser.problems == []


def test_where_copying_is_not_allowed_the_command_is_selected(browser: Browser, folder: Path) -> None:
    with served(folder) as address:
        open_page(browser, f"{address}#{SAMPLE}", GROUP)
        browser.evaluate("void (navigator.clipboard.writeText = () => Promise.reject(new Error('no')))")
        browser.evaluate(f"{BUTTONS}[1].click()")
        browser.evaluate("document.querySelector('.command button').click()")
        browser.wait_for("getSelection().toString().startsWith('fovea saliency ')")


def test_all_maps_of_a_page_are_switched_on_and_off(browser: Browser, folder: Path) -> None:
    with served(folder) as address:
        open_page(browser, f"{address}#held-out", f"{BUTTONS}.length === 2")
        assert browser.evaluate(COVERS) == 0
        browser.evaluate("document.querySelector('.held-out').closest('.page').querySelector('input.maps').click()")
        browser.wait_for(f"{COVERS} === 1")
        browser.press("s")
        browser.wait_for("document.querySelector('.samples .cover')")
        browser.press("m")
        browser.wait_for(f"{COVERS} === 0")
        assert "maps=" not in browser.evaluate("location.hash")
        assert browser.problems == []


def test_a_map_that_is_made_meanwhile_is_found(browser: Browser, folder: Path) -> None:
    with served(folder) as address:
        open_page(browser, f"{address}#held-out?maps=on", f"{COVERS} === 1")
        keep_map(folder, map_of("test/1", "4"))
        browser.wait_for(f"{COVERS} === 2")
        open_page(browser, f"{address}#{SAMPLE}&maps=on", f"{COVERS} === 1")
        keep_map(folder, map_of("train/0", "(100,200),(500,600)"))
        browser.wait_for("document.querySelectorAll('button.map:not(.none)').length === 2")


def test_a_run_without_maps_has_no_switch(browser: Browser, tmp_path: Path) -> None:
    with served(write_run(tmp_path / "run")) as address:
        open_page(browser, f"{address}#{SAMPLE}", GROUP)
        assert browser.evaluate("document.querySelector('input.maps').closest('label').hidden")


def test_a_name_of_weights_stays_text(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    record = group(image_in(folder), 0, HOSTILE)
    write_samples(folder, 4, [replace(record, answers=record.answers[1:])])
    keep_map(folder, map_of("train/0", record.answers[1].turns[0].text, weights=HOSTILE))
    page = export([ViewedRun(folder)], tmp_path / "out.html")
    with served(folder) as address:
        for start in (address, page.as_uri()):
            open_page(browser, f"{start}#{SAMPLE}&maps=on", "document.querySelector('.note')")
            assert text_of(browser, ".note").endswith(HOSTILE)
            assert browser.evaluate("document.title") == "run · Fovea"
            assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_narrow_screen(browser: Browser, folder: Path) -> None:
    with served(folder) as address:
        open_page(browser, f"{address}#{SAMPLE}&maps=on", "document.querySelector('.cover')", width=390, height=800)
        browser.evaluate(f"{BUTTONS}[1].click()")
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
