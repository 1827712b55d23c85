"""A headless Chromium, driven over its debugging pipe: pages are opened, scripted, typed into and photographed.

https://chromedevtools.github.io/devtools-protocol/ (messages end with a zero byte; the browser reads descriptor 3 and
writes descriptor 4).
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
TIMEOUT_S = 120.0
"""Of one command, on a slow machine that is busy with other tests."""


def chromium() -> str:
    """The browser's program; skips the test where there is none."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on the PATH")
    return program


class NavigatedError(Exception):
    """The page was left before it answered."""


class Browser:
    """One browser with one page."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._read = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        """What the page has reported since it was opened: exceptions, console messages, violations of its policy."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """The result of a command of the protocol."""
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                if "navigated" in str(answer.get("error")):
                    raise NavigatedError
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _message(self) -> dict[str, Any]:
        until = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"the browser has not answered for {TIMEOUT_S} s"
            self._read += os.read(self._answers, 1 << 20)
        message, _, self._read = self._read.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def open(self, address: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Go to a page; what is evaluated from then on meets this page, which may still be loading."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._navigate("about:blank")  # an address that differs only in its hash loads nothing
        self.events.clear()  # those of the page before
        self._navigate(address)

    def _navigate(self, address: str) -> None:
        answer = self.call("Page.navigate", url=address)
        assert "errorText" not in answer, f"{address}: {answer['errorText']}"
        # the answer comes before the page does: until then the old page is asked
        while not any(_begins(event, answer["loaderId"]) for event in self.events):
            self.events.append(self._message())

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page, awaited."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + TIMEOUT_S
        while not self._is_true(script):
            assert time.monotonic() < until, f"never true: {script}\n{self.evaluate('document.body.innerText')}"
            time.sleep(0.05)

    def _is_true(self, script: str) -> bool:
        try:
            return bool(self.evaluate(f"Boolean({script})"))
        except NavigatedError:  # to the page for which the caller waits
            return False

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def point_at(self, selector: str) -> None:
        """Move the mouse to the middle of an element."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.evaluate(f"(() => {{ const b = {box}; return [b.x + b.width / 2, b.y + b.height / 2]; }})()")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        height = self.evaluate("document.documentElement.scrollHeight") if whole else 0
        width = self.evaluate("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole, **({"clip": clip} if whole else {}))
        path.write_bytes(base64.b64decode(shot["data"]))

    @property
    def problems(self) -> list[str]:
        """Exceptions, and errors on the console."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in kinds]


def _begins(event: dict[str, Any], loader: str) -> bool:
    return event.get("method") == "Page.frameNavigated" and event["params"]["frame"]["loaderId"] == loader


@contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    """A browser that ends with the block."""
    (its_commands, commands), (answers, its_answers) = os.pipe(), os.pipe()
    # a shell gives the pipes their numbers: a function of ours between fork and exec is unsafe beside threads
    start = f'exec "$@" 3<&{its_commands} 4>&{its_answers}'
    program = subprocess.Popen(
        ["bash", "-c", start, "bash", chromium(), *FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(its_commands, its_answers),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(its_commands)
    os.close(its_answers)
    try:
        yield Browser(commands, answers)
    finally:
        program.kill()
        program.wait()
        os.close(commands)
        os.close(answers)
