"""A headless Chromium, driven by Playwright: pages are opened, scripted, typed into and photographed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import CDPSession, ConsoleMessage, Error, Page, sync_playwright

TIMEOUT_S = 120.0
"""Of one command, on a slow machine that is busy with other tests."""


def chromium() -> str:
    """The browser's program; skips the test where there is none."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on the PATH")
    return program


class Browser:
    """One browser with one page."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.problems: list[str] = []
        """Exceptions, errors and warnings of the page since it was opened, violations of its policy among them."""
        page.set_default_timeout(1000 * TIMEOUT_S)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", self._on_console)

    @cached_property
    def protocol(self) -> CDPSession:
        """The browser's debugging protocol, for what Playwright does not offer."""
        return self.page.context.new_cdp_session(self.page)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def open(self, address: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Go to a page; what is evaluated from then on meets this page, which may still be loading."""
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.emulate_media(color_scheme="dark" if dark else "light")
        self.page.goto("about:blank")  # an address that differs only in its hash loads nothing
        self.problems.clear()  # those of the page before
        self.page.goto(address, wait_until="commit")

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page, called if it is a function, and awaited."""
        return self.page.evaluate(script)

    def wait_for(self, script: str) -> None:
        """Wait until an expression is true; not by Playwright's own loop, which the page's policy stops."""
        until = time.monotonic() + TIMEOUT_S
        while not self._is_true(script):
            assert time.monotonic() < until, f"never true: {script}\n{self.evaluate('document.body.innerText')}"
            self.page.wait_for_timeout(50)

    def _is_true(self, script: str) -> bool:
        try:
            return bool(self.evaluate(f"Boolean({script})"))
        except Error as error:
            if "context was destroyed" in error.message:  # left for the page for which the caller waits
                return False
            raise

    def press(self, key: str) -> None:
        self.page.keyboard.press(key)

    def point_at(self, selector: str) -> None:
        """Move the mouse to the middle of an element."""
        box = self.page.locator(selector).first.bounding_box()
        assert box is not None, f"{selector} is not drawn"
        self.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        self.page.screenshot(path=path, full_page=whole)


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser that ends with the block."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium())
        try:
            yield Browser(browser.new_page())
        finally:
            browser.close()
