"""The documentation as a site: built without a warning, complete, and without a request to anywhere else."""

from __future__ import annotations

import html
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import fovea
from fovea.config.describe import describe
from fovea.metrics.names import METRICS
from fovea_tools.importer.elsewhere import systems
from tests.chromium import open_browser
from tests.runs import ROOT, run_program

LOADS = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(https?:)?//|<link\b[^>]*\bhref=\"?(https?:)?//|url\(['\"]?https?:"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors: links, anchors, pages that no menu has."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = run_program(command, {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr
    return folder


@contextmanager
def served(folder: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_the_site_has_every_page_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    written = [path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")]
    assert {path.as_posix() for path in written} <= set(pages)
    assert all(f"<code>{html.escape(each.name)}</code>" in pages["reference/metrics.html"] for each in METRICS)
    for name, system in systems().items():
        settings = pages[f"reference/from-{name}.html"]
        assert all(f"<code>{html.escape(each.theirs)}</code>" in settings for each in system.settings)
    assert not [name for name, text in pages.items() if LOADS.search(text)]
    settings = pages["reference/settings.html"]
    assert all(f"<code>{each.key}</code>" in settings for each in describe())
    public = set(fovea.__all__) - {"__version__"}
    assert all(re.search(rf'id="fovea(_gym)?\.[\w.]+\.{name}"', pages["reference/python.html"]) for name in public)
    assert 'id="fovea_gym.environments.base.Environment.tasks"' in pages["reference/protocols.html"]
    # a link out of docs/ leads to the file's page
    assert "source/fovea/loop.py.html" in pages["index.html"]
    assert "def train(" in re.sub(r"<[^>]+>", "", pages["source/fovea/loop.py.html"])
    found = {each["location"] for each in json.loads((site / "search" / "search_index.json").read_text())["docs"]}
    assert "reference/settings.html#rolloutsamples_per_prompt" in found
    assert not any(location.startswith("source/fovea/") for location in found)


@pytest.mark.browser
def test_the_search_finds_a_setting_and_asks_nobody_else(site: Path) -> None:
    with served(site) as address, open_browser() as browser:
        asked: list[str] = []
        browser.page.on("request", lambda request: asked.append(request.url))
        browser.open(f"{address}/get-started.html?q=samples_per_prompt", dark=True)
        found = "a.md-search-result__link[href$='#rolloutsamples_per_prompt']"
        browser.wait_for(f"document.querySelector({json.dumps(found)})")
        assert browser.evaluate("document.body.dataset.mdColorScheme") == "slate"
        assert asked
        assert all(url.startswith((address, "data:", "about:", "blob:")) for url in asked)
        assert not browser.problems
        browser.open(f"{address}/index.html", width=390)
        browser.wait_for("document.readyState == 'complete'")
        assert browser.evaluate("document.documentElement.scrollWidth") <= 390
        assert not browser.problems
