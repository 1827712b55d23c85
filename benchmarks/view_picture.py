"""Takes pictures of the page of `fovea view` for docs/view.md, with one run or with two.

    python -m benchmarks.view_picture runs/grpo runs/other --step 100 --group 2 --out docs

The page is exported and opened in headless Chromium for screenshots. Needs Chromium and the packages for tests.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from fovea.report.export import export
from fovea.report.viewed_run import ViewedRun
from tests.chromium import Browser, open_browser

WIDTH, HEIGHT = 1280, 800
"""Size of the browser window in pixels."""
NUM_COLOURS = 256
"""Size of the palette, with which a file is a third as large. The page has few colours, some only in thin lines."""
LOADED = "[...document.images].every((image) => image.complete && image.naturalWidth)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture of a part of the page, and a script expression that is true once that part is drawn."""

    name: str
    hash: str
    ready: str


def pictures(num_runs: int, step: int | None, group: int) -> Iterator[Picture]:
    """Yield the overview of one run, the curves, and the groups of a recorded step (None: the newest)."""
    place = "" if step is None else f"&step={step}&group={group}"
    curves, samples = ("view_curves", "view_samples") if num_runs == 1 else ("view_curves_compared", "view_compared")
    if num_runs == 1:
        yield Picture(name="view_overview", hash="#overview", ready="document.querySelector('.plot polyline')")
    yield Picture(name=curves, hash="#curves", ready="document.querySelector('.plot polyline')")
    yield Picture(
        name=samples,
        hash=f"#samples?heat=advantage{place}",
        ready=f"document.querySelectorAll('.group .question').length === {num_runs} && {LOADED}",
    )


def take(browser: Browser, runs: Sequence[Path], out: Path, *, step: int | None = None, group: int = 0) -> list[Path]:
    """Take the pictures of these runs; returns the picture files."""
    made = []
    with TemporaryDirectory() as parent:
        page = export([ViewedRun(run) for run in runs], Path(parent, "page.html"))
        for each in pictures(len(runs), step, group):
            browser.open(f"{page.as_uri()}{each.hash}", width=WIDTH, height=HEIGHT)
            browser.wait_for(each.ready)
            file = out / f"{each.name}.png"
            browser.screenshot(file, whole=False)
            Image.open(file).convert("RGB").quantize(NUM_COLOURS, Image.Quantize.MAXCOVERAGE).save(file, optimize=True)
            made.append(file)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--step", type=int, help="recorded step whose samples are shown; default: the newest")
    parser.add_argument("--group", type=int, default=0, help="number of the group in that step, from 0")
    parser.add_argument("--out", type=Path, default=Path("docs"))
    given = parser.parse_args()
    with open_browser() as browser:
        for file in take(browser, given.runs, given.out, step=given.step, group=given.group):
            print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
