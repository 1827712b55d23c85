"""Pages to click on: hits as a browser has them, and the recipe's figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np
from PIL import Image

from fovea_gym.examples.pages.environment import Pages, PagesEnvironment, pages_of
from fovea_gym.examples.pages.page import Control, html, picture, random_controls
from tests.chromium import Browser, open_browser

ROOT = Path(__file__).parents[3]


def test_the_recipe_says_what_players_reach_that_see_less() -> None:
    """Any control of the page, any of the right kind, any of the right colour; the menu is always found."""
    tasks = Pages(PagesEnvironment(scale=10, test_size=300), seed=0).tasks("test")

    def share(is_alike: Callable[[Control, Control], bool]) -> str:
        pages = [pages_of(task)[-1] for task in tasks]
        return f"{np.mean([1 / sum(is_alike(other, page[0]) for other in page) for page in pages]):.2f}"[1:]

    any_, kind, colour = map(share, (lambda *_: True, lambda a, b: a.kind == b.kind, lambda a, b: a.colour == b.colour))
    header = " ".join((ROOT / "recipes" / "pages.yaml").read_text().replace("#", "").split())
    told = f"right in {any_} of them, one that tells their kinds in {kind}, one that tells their colours in {colour}."
    assert told in header


def test_a_browser_shows_the_same_page_and_clicks_the_same_controls(tmp_path: Path) -> None:
    rng, side = np.random.default_rng(0), 192
    with open_browser() as browser:
        for has_menu in (False, True):
            controls = random_controls(5, rng, menu=has_menu)
            browser.open(f"data:text/html,{quote(html(controls))}", width=side, height=side)
            browser.wait_for("document.body")
            browser.screenshot(tmp_path / "page.png", whole=False)
            with Image.open(tmp_path / "page.png") as shot:
                theirs = np.asarray(shot.convert("RGB"), dtype=float)
            # both draw edges softly, each in its way
            assert np.abs(theirs - picture(controls, side)).mean() < 1
            names = {control.name for control in controls}
            places = [*rng.uniform(0.02, 0.98, (40, 2)), *(control.centre for control in controls)]
            for x, y in (np.round(place * np.array(side)) for place in np.array(places)):
                near = {hit(controls, (x + right) / side, (y + down) / side) for right in (-2, 2) for down in (-2, 2)}
                # a browser's pixel at an edge belongs to one side of it
                if len(near | {hit(controls, x / side, y / side)}) == 1:
                    clicked = clicked_by_mouse(browser, int(x), int(y))
                    assert near == {clicked}
                    names.discard(clicked)
            assert names == set()


def hit(controls: Sequence[Control], x: float, y: float) -> str:
    return next((control.name for control in controls if control.is_hit(x, y)), "page")


def clicked_by_mouse(browser: Browser, x: int, y: int) -> str:
    """Click with the browser's mouse, and the name of the control that it says was clicked."""
    browser.evaluate("document.title = ''")
    browser.page.mouse.click(x, y)
    name: str = browser.evaluate("document.title")
    return name
