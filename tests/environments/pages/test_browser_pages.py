"""Pages in Chromium as an environment with sessions: what the browser says was hit is what earns the reward."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil
import pytest

from examples.browser import BrowserPages
from fovea_gym.examples.pages.environment import pages_of
from fovea_gym.examples.pages.page import picture
from fovea_gym.types import Score, Task, Turn
from tests.chromium import chromium

pytestmark = pytest.mark.browser
SETTINGS = {"scale": 48, "train_size": 20, "dev_size": 10, "test_size": 10}


@pytest.fixture(scope="module")
def environment() -> Any:
    chromium()
    return BrowserPages(SETTINGS)


async def played(environment: Any, task: Task, texts: Sequence[str]) -> tuple[list[Any], Score]:
    """The pictures after the first, up to the end of the episode, and its score."""
    session = await environment.open(task, 0)
    turns: list[Turn] = []
    pictures = []
    for text in texts:
        turns.append(Turn(messages=(), text=text))
        messages = await session.reply(turns) if len(turns) < environment.max_turns else None
        if messages is None:
            break
        pictures.append(messages[0].parts[0].source)
    score = await session.score(turns)
    await session.close()
    return pictures, score


def test_many_episodes_at_once_earn_full_marks_for_clicks_on_the_centres(environment: Any) -> None:
    tasks = environment.tasks("test")[:8]

    async def together() -> list[tuple[list[Any], Score]]:
        return await asyncio.gather(*(played(environment, task, environment.demonstration(task)) for task in tasks))

    for task, (pictures, score) in zip(tasks, asyncio.run(together()), strict=True):
        pages = pages_of(task)
        assert (score.reward, score.accuracy) == (pytest.approx(1), 1)
        assert score.turns == pytest.approx((1 / len(pages),) * len(pages))
        seen = [task.images[0].source, *pictures]
        # edges are drawn softly, each in its way
        apart = [np.abs(shot - picture(page, 48).astype(float)) for shot, page in zip(seen, pages, strict=True)]
        assert max(each.mean() for each in apart) < 4


def test_a_click_beside_it_ends_the_episode(environment: Any) -> None:
    task = environment.tasks("test")[1]
    menu, control = environment.demonstration(task)
    decoy = ",".join(str(round(48 * place)) for place in pages_of(task)[1][1].centre)

    def score(*texts: str) -> Any:
        found = asyncio.run(played(environment, task, texts))[1]
        return pytest.approx((found.reward, found.accuracy)), len(found.turns or ())

    assert score(menu, decoy) == ((0.6, 0), 2)
    assert score(decoy, control) == ((0.1, 0), 1)
    assert score("the menu", control) == ((0, 0), 1)
    assert score(menu, "49,1") == ((0.5, 0), 2)


def test_a_browser_that_is_killed_starts_again(environment: Any) -> None:
    task = environment.tasks("test")[0]

    async def full_marks() -> bool:
        return (await played(environment, task, environment.demonstration(task)))[1].accuracy == 1

    assert asyncio.run(full_marks())
    browsers = [each for each in psutil.Process().children(recursive=True) if "chrom" in each.name()]
    assert browsers
    for each in browsers:
        each.kill()
    psutil.wait_procs(browsers, timeout=30)
    assert asyncio.run(full_marks())
