"""Pages to click on: hits as a browser has them, rewards of clicks, and no page in two splits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image

from fovea_gym.environments.base import Split
from fovea_gym.examples.pages.environment import Pages, click_in, pages_of
from fovea_gym.examples.pages.page import Control, html, picture, random_controls
from fovea_gym.settings.games import PagesEnvironment
from fovea_gym.types import Score, Task, Turn
from fovea_gym.utils.event_loop import wait_for
from tests.chromium import Browser, open_browser

ROOT = Path(__file__).parents[3]
SPLITS: tuple[Split, ...] = ("train", "dev", "test")


def played(environment: Pages, task: Task, texts: Sequence[str]) -> tuple[list[Any], Score]:
    """The pictures after the first, up to the end of the episode, and its score."""
    turns: list[Turn] = []
    pictures = []
    for text in texts:
        turns.append(Turn(messages=(), text=text))
        messages = environment.reply(task, turns) if len(turns) < environment.max_turns else None
        if messages is None:
            break
        pictures.append(messages[0].parts[0].source)  # type: ignore[union-attr]
    return pictures, wait_for(environment.graders[-1].score(task, turns))


@pytest.mark.parametrize("settings", [{}, {"scale": 99}])
def test_clicks_on_the_centres_are_right(settings: dict[str, Any]) -> None:
    environment = Pages(PagesEnvironment(**settings), 0)
    for split in SPLITS:
        for task in environment.tasks(split)[:30]:
            texts = environment.demonstration(task)
            pictures, score = played(environment, task, texts)
            assert len(texts) == (2 if task.kind == "menu" else 1)
            assert len(pictures) == len(texts) - 1
            assert (score.reward, score.accuracy, score.parts) == (1.0, 1.0, {"format": 1.0})
            assert score.turns == (1 / len(texts),) * len(texts)


def test_a_wrong_click_ends_the_episode_and_a_menu_is_half_of_its_task() -> None:
    environment = Pages(PagesEnvironment(), 0)
    task = environment.tasks("test")[1]
    menu, control = environment.demonstration(task)
    closed, opened = pages_of(task)
    decoy = ",".join(str(round(1000 * place)) for place in closed[1].centre)
    pictures, score = played(environment, task, [menu, menu[::-1]])
    assert (pictures[0] == picture(opened, 48)).all()
    assert (score.reward, score.accuracy, score.turns) == (0.5, 0.0, (0.5, 0.0))
    pictures, score = played(environment, task, [decoy, control])
    assert (pictures, score.reward, score.turns) == ([], 0.0, (0.0,))


def test_neither_word_of_a_control_is_enough_to_find_it() -> None:
    for task in Pages(PagesEnvironment(), 0).tasks("train")[:100]:
        asked, same_kind, same_colour, *_ = pages_of(task)[-1]
        assert (same_kind.kind, same_colour.colour) == (asked.kind, asked.colour)
        assert len({control.name for control in pages_of(task)[-1]}) == len(pages_of(task)[-1])


def test_no_page_is_in_two_splits() -> None:
    environment = Pages(PagesEnvironment(), 0)
    seen = {
        split: {task.images[0].source.tobytes() for task in environment.tasks(split)[:200]}  # type: ignore[union-attr]
        for split in SPLITS
    }
    assert seen["train"].isdisjoint(seen["dev"] | seen["test"])
    assert seen["dev"].isdisjoint(seen["test"])


def test_clicks_in_answers() -> None:
    assert click_in(" 250,1000 ", 1000) == (0.25, 1.0)
    answers = ("250,1001", "-1,5", "1.5,2", "click(1,2)", "1,2,3", "", "1" * 5000 + ",1")
    assert [click_in(answer, 1000) for answer in answers] == [None] * len(answers)


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


def test_the_recipe_says_what_players_reach_that_see_less() -> None:
    """Any control of the page, any of the right kind, any of the right colour; the menu is always found."""
    tasks = Pages(PagesEnvironment(scale=10, test_size=300), seed=0).tasks("test")

    def share(is_alike: Callable[[Control, Control], bool]) -> str:
        pages = [pages_of(task)[-1] for task in tasks]
        return f"{np.mean([1 / sum(is_alike(other, page[0]) for other in page) for page in pages]):.2f}"[1:]

    any_, kind, colour = (
        share(is_alike)
        for is_alike in (lambda *_: True, lambda a, b: a.kind == b.kind, lambda a, b: a.colour == b.colour)
    )
    header = " ".join((ROOT / "recipes" / "pages.yaml").read_text().replace("#", "").split())
    expected = (
        f"right in {any_} of them, one that tells their kinds in {kind}, one that tells their colours in {colour}."
    )
    assert expected in header
