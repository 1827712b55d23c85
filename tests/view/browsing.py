"""A browser on the real server of `fovea view`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fovea.report.viewed_run import ViewedRun
from fovea.view.list_app import make_list_app
from fovea.view.run_list import is_folder_of_runs
from fovea.view.server import make_app, serve
from tests.chromium import TIMEOUT_S, Browser
from tests.report.pages import ATTACK

HOSTILE = f"{ATTACK}\u202egnp\u202c שלום مرحبا " + "x" * 20_000
GROUP = "document.querySelector('.group .question')"
LINE = "document.querySelector('.plot')?.querySelector('polyline')"
"""The line of the first chart; another chart may be drawn before it."""


@contextmanager
def served(*folders: Path) -> Iterator[str]:
    """The address of the real server with these runs, or with a folder of runs, until the block ends."""
    addresses: list[str] = []
    app = make_list_app(folders[0]) if is_folder_of_runs(folders[0]) else make_app(list(map(ViewedRun, folders)))
    # the thread ends with the tests: a server leaves its loop by a signal, which only the main thread gets
    threading.Thread(target=serve, args=(app, 0, addresses.append), daemon=True).start()
    until = time.monotonic() + TIMEOUT_S
    while not addresses:
        assert time.monotonic() < until, "the server never said its address"
        time.sleep(0.01)
    yield addresses[0]


def open_page(browser: Browser, address: str, ready: str, **look: int | bool) -> None:
    browser.open(address, **look)
    browser.wait_for(ready)


@contextmanager
def opened(browser: Browser, place: str, ready: str, *folders: Path, **look: int) -> Iterator[str]:
    """A page of the real server on these runs that reports no problem up to the end of the block."""
    with served(*folders) as address:
        open_page(browser, f"{address}{place}", ready, **look)
        yield address
        assert browser.problems == []


def text_of(browser: Browser, selector: str) -> str:
    return browser.evaluate(f"document.querySelector({selector!r}).textContent")


def choose(browser: Browser, selector: str, value: str, event: str = "change") -> None:
    """Set a control as a user does."""
    browser.evaluate(f"document.querySelector({selector!r}).value = {value!r}")
    browser.evaluate(f"document.querySelector({selector!r}).dispatchEvent(new Event({event!r}))")
