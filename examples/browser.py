"""An environment of clicks in a real browser: the pages of `pages`, shown by Chromium and seen in its screenshots.

    pip install playwright && playwright install chromium
    fovea train examples/browser.yaml

Answers have the same format as in `pages`, so a model trained there can be evaluated here. Each click is made by the
browser's mouse, and the page reports which control was hit. The reward is GUI-R1's (arXiv 2504.10458): 0.2 for the
format of an answer and 0.8 for a hit. The browser is closed at the end of the run.
"""

from __future__ import annotations

import asyncio
import io
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image
from playwright.async_api import Browser, Page, Playwright, async_playwright

from fovea.processes.session_processes import session_environment
from fovea_gym.environments.base import Split
from fovea_gym.examples.pages.environment import Pages, PagesEnvironment, click_in, kind_of, pages_of
from fovea_gym.examples.pages.page import MENU, html
from fovea_gym.rows.tasks import LazyTasks
from fovea_gym.types import ImageRef, Mark, Message, Score, Task, Turn
from fovea_gym.utils.event_loop import BackgroundLoop

SIDE_PX = 48
"""Side of the browser window: its screenshot is 9 visual tokens for the tiny models."""
FORMAT_WEIGHT = 0.2


class Chromium:
    """A headless Chromium without network access, started on first use."""

    def __init__(self) -> None:
        self._loop = BackgroundLoop("chromium")
        self._playwright: Playwright | None = None
        self._browser: Browser | None = None
        self._free: list[Page] = []
        self._starting = asyncio.Lock()

    async def open(self, source: str) -> Page:
        """Open a page that shows this HTML, for one episode."""
        return await self._loop.run(self._open(source))

    def screenshot_of(self, source: str) -> ImageRef:
        """Take a screenshot of this HTML."""
        return self._loop.wait(self._screenshot_of(source))

    async def click(self, page: Page, x: float, y: float) -> str:
        """Click at (x, y), in shares of the window; returns the name of the control that the page reports as hit."""
        return await self._loop.run(_click(page, x, y))

    async def show(self, page: Page, source: str) -> ImageRef:
        """Show other HTML on a page; returns a screenshot of it."""
        return await self._loop.run(_show(page, source))

    def close(self, page: Page) -> None:
        """Return a page for use by the next episode."""
        self._free.append(page)

    async def _open(self, source: str) -> Page:
        while self._free:
            page = self._free.pop()
            if not page.is_closed():  # the pages of a browser that has ended are closed
                break
        else:
            page = await self._new_page()
        await page.set_content(source)
        return page

    async def _new_page(self) -> Page:
        async with self._starting:
            if self._browser is None or not self._browser.is_connected():
                self._playwright = self._playwright or await async_playwright().start()
                self._browser = await _launched(self._playwright)
        return await self._browser.new_page(viewport={"width": SIDE_PX, "height": SIDE_PX}, offline=True)

    async def _screenshot_of(self, source: str) -> ImageRef:
        page = await self._open(source)
        picture = await _picture(page)
        self.close(page)
        return picture


async def _launched(playwright: Playwright) -> Browser:
    """Start the Chromium of this machine, or Playwright's if there is none."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    return await playwright.chromium.launch(executable_path=program, env={**session_environment()})


async def _click(page: Page, x: float, y: float) -> str:
    await page.mouse.click(x * SIDE_PX, y * SIDE_PX)
    name: str = await page.title()
    return name


async def _show(page: Page, source: str) -> ImageRef:
    await page.set_content(source)
    return await _picture(page)


async def _picture(page: Page) -> ImageRef:
    with Image.open(io.BytesIO(await page.screenshot())) as image:
        return ImageRef(source=np.asarray(image.convert("RGB")), where="a screenshot")


class BrowserPages:
    """The environment; it has the same `environment.settings` as `pages`."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._scale = PagesEnvironment(**settings).scale
        self._pages = Pages(PagesEnvironment(**settings), seed=0)
        self._chromium = Chromium()
        self.max_turns = self._pages.max_turns
        self.prompt, self.target, self.demonstration = (
            self._pages.prompt,
            self._pages.target,
            self._pages.demonstration,
        )

    def tasks(self, split: Split) -> Sequence[Task]:
        rows = self._pages.tasks(split)
        return LazyTasks(lambda index: self._seen(rows[index]), range(len(rows)), kind_of=kind_of)

    async def open(self, task: Task, seed: int) -> Episode:
        sources = [html(controls) for controls in pages_of(task)]
        return Episode(task, self._scale, sources, self._chromium, await self._chromium.open(sources[0]))

    def _seen(self, task: Task) -> Task:
        """The task with a screenshot of its page as the image."""
        return replace(task, images=(self._chromium.screenshot_of(html(pages_of(task)[0])),))


class Episode:
    """An episode on one page of the browser; after a click on its menu, the page is shown with the menu open."""

    def __init__(self, task: Task, scale: int, sources: Sequence[str], chromium: Chromium, page: Page) -> None:
        self._task, self._scale, self._sources = task, scale, sources
        self._chromium, self._page = chromium, page
        self._hits: list[bool] = []

    async def reply(self, turns: Sequence[Turn]) -> Sequence[Message] | None:
        await self._play(turns[-1].text)
        if not self._hits[-1] or len(self._hits) == len(self._sources):
            return None
        return [Message(role="user", parts=(await self._chromium.show(self._page, self._sources[len(self._hits)]),))]

    async def score(self, turns: Sequence[Turn]) -> Score:
        if len(self._hits) < len(turns):  # `reply` is not called for the last turn that max_turns allows
            await self._play(turns[-1].text)
        clicks = [click_in(turn.text, self._scale) for turn in turns]
        rewards = [
            ((1 - FORMAT_WEIGHT) * hit + FORMAT_WEIGHT * (click is not None)) / len(self._sources)
            for hit, click in zip(self._hits, clicks, strict=True)
        ]
        return Score(
            reward=sum(rewards),
            accuracy=float(sum(self._hits) == len(self._sources)),
            parts={"format": float(np.mean([click is not None for click in clicks]))},
            marks=() if clicks[0] is None else (Mark(image=1, xy=clicks[0], label="click"),),
            turns=tuple(rewards),
        )

    async def close(self) -> None:
        self._chromium.close(self._page)

    async def _play(self, text: str) -> None:
        """Click at the place that an answer names, and record whether the right control was hit."""
        click = click_in(text, self._scale)
        is_last = len(self._hits) == len(self._sources) - 1
        hit = None if click is None else await self._chromium.click(self._page, *click)
        self._hits.append(hit == (self._task.answer if is_last else MENU))
