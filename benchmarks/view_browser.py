"""Measures how long a user waits for the page of `fovea view` in headless Chromium, on runs of 10,000 recorded steps.

    python -m benchmarks.view_browser --steps 10000

A separate process of `fovea view` serves two synthetic runs, each with 80 metrics and 4 groups of 8 answers of 300
tokens per step. A time runs from an action until its result is drawn, two frames after the page contains it. Needs
Chromium and the packages for tests.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from rich.table import Table

from benchmarks.printing import as_table, show
from fovea.config.loading import dump_config
from fovea.config.model import Model, TinyModel
from fovea.config.run import Config
from fovea.evaluation.records import (
    ANSWERED_ROW,
    AnsweredRow,
    RecordedEpisode,
    RecordedMessage,
    RecordedTurn,
    TokenTrace,
)
from fovea.metrics.jsonl import METRICS_FILE
from fovea.report.about import CONFIG_FILE
from fovea.report.samples import INDEX_FILE, INDEXED_STEP, indexed, samples_folder, step_path
from fovea_gym.utils.stored import to_json
from tests.chromium import Browser, open_browser

METRICS, GROUPS, ANSWERS, TOKENS = 80, 4, 8, 300
REPEATS = 5
SHORT = 20
"""Steps of a short run, which shows how long the browser takes to open any page."""
DRAWN = """
const drawn = async (ready) => {
  const until = performance.now() + 30000;
  while (!ready()) {
    if (performance.now() > until) throw new Error(`never so: ${ready}`);
    await new Promise(requestAnimationFrame);
  }
  await new Promise(requestAnimationFrame);
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return performance.now();
};
"""
CHART = "document.querySelector('.plot polyline')"
PLACE = "document.querySelector('.group .place')?.textContent"
COUNT = "document.querySelector('.columns nav p')?.textContent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The time from an action until its result is drawn, and how long the page's thread was busy with it."""

    wall_ms: float
    busy_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Something that a user does on the page, and a script expression that is true once the result is shown."""

    name: str
    do: str
    ready: str
    hash: str = "#samples"
    """Hash of the address at which the action starts."""


def make_run(folder: Path, steps: int) -> None:
    """Write a run folder of `steps` steps, all of them with recorded samples."""
    samples_folder(folder).mkdir(parents=True)
    config = Config(max_steps=steps, model=Model(tiny=TinyModel()))
    (folder / CONFIG_FILE).write_text(dump_config(config), encoding="utf-8")
    with (folder / METRICS_FILE).open("w", encoding="utf-8") as metrics:
        metrics.writelines(metrics_line(step) for step in range(1, steps + 1))
    records = [_record(place) for place in range(GROUPS)]
    content = "".join(to_json(ANSWERED_ROW, record) + "\n" for record in records)
    with (samples_folder(folder) / INDEX_FILE).open("w", encoding="utf-8") as index:
        index.writelines(to_json(INDEXED_STEP, indexed(step, records)) + "\n" for step in range(1, steps + 1))
    first = step_path(folder, 1)
    first.write_text(content, encoding="utf-8")
    for step in range(2, steps + 1):
        step_path(folder, step).hardlink_to(first)  # links, since copies would take a gigabyte


def metrics_line(step: int) -> str:
    """Make a line of metrics.jsonl."""
    values = {f"metric/{number}": math.sin(step / (50 + number)) for number in range(METRICS)}
    return json.dumps({"step": step, "reward": step / 1e4} | values) + "\n"


def _record(place: int) -> AnsweredRow:
    prompt = f"How many circles are in picture {place}?"
    tokens = TokenTrace(
        pieces=(" token",) * TOKENS,
        engine_logprobs=(-0.1234,) * TOKENS,
        trainer_logprobs=(-0.1235,) * TOKENS,
        advantages=(0.5401,) * TOKENS,
    )
    text = " token" * TOKENS
    answer = RecordedEpisode(
        turns=(RecordedTurn(text=text, tokens=tokens),), reward=1.0, accuracy=1.0, parts={"format": 1.0}
    )
    return AnsweredRow(
        id=f"train/{place}",
        question=prompt,
        truth="3",
        kind=f"kind {place}",
        messages=(RecordedMessage(role="user", parts=(prompt,)),),
        answers=(answer,) * ANSWERS,
    )


def key(name: str) -> str:
    return f"document.body.dispatchEvent(new KeyboardEvent('keydown', {{ key: {name!r}, bubbles: true }}))"


def entered(selector: str, value: str, event: str = "change") -> str:
    found = f"document.querySelector({selector!r})"
    return f"({found}.value = {value!r}, {found}.dispatchEvent(new Event({event!r}, {{ bubbles: true }})))"


def actions(steps: int) -> Iterator[Action]:
    """Yield the actions of a user, in their usual order."""
    middle = steps // 2
    newest, groups = f"step {steps:,} ", f"{4 * steps:,}"
    yield Action(name="nothing: two frames", do="0", ready="true")
    yield Action(
        name="samples, the page being open", do=key("s"), ready=f"{PLACE}?.includes('{newest}')", hash="#curves"
    )
    yield Action(name="curves again", do=key("c"), ready=CHART)
    yield Action(
        name="search of a metric",
        do=entered("#search", "metric/7", "input"),
        ready="document.querySelectorAll('.plot polyline').length === 11",
        hash="#curves",
    )
    yield Action(name="the step before", do=key("["), ready=f"{PLACE}?.includes('step {steps - 1:,} ')")
    yield Action(
        name="a step far away",
        do=f"(location.hash = '#samples?step={middle}&group=0')",
        ready=f"{PLACE}?.includes('step {middle:,} ')",
    )
    yield Action(
        name="the next group", do=key("j"), ready=f"{PLACE}?.includes('kind 1')", hash=f"#samples?step={middle}&group=0"
    )
    filters = {
        "question type": (entered("#kind", "kind 2"), f"{steps:,} of {groups}"),
        "steps from": (entered("[name=from]", f"{middle + 1}"), f"{2 * steps:,} of {groups}"),
        "reward from": (entered("[name=low]", "0.5"), f"{groups} of {groups}"),
        "groups whose rewards differ": (entered("#only", "mixed"), f"0 of {groups}"),
    }
    for name, (do, count) in filters.items():
        # start with a filter that no group passes, so that the expected count is not shown yet
        start = "#samples?low=2" if count.startswith(groups) else "#samples"
        yield Action(name=f"filter: {name}", do=do, ready=f"{COUNT}?.includes('{count}')", hash=start)
    yield Action(name="tokens by advantage", do=key("h"), ready="document.querySelectorAll('.token').length === 2400")
    yield Action(
        name="to the other end of the list",
        do="((list) => { list.scrollTop = 0; })(document.querySelector('.list'))",
        ready="document.querySelector('.list a span').textContent === '1'",
    )


@contextmanager
def served(*folders: Path) -> Iterator[str]:
    """Run `fovea view` on these runs in the context; yields its address."""
    command = (sys.executable, "-m", "fovea", "view", *map(str, folders), "--port", "0")
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield next(word for line in server.stdout for word in line.split() if word.startswith("http://"))
    finally:
        server.terminate()
        server.wait()


def waits(browser: Browser, address: str, action: Action) -> list[Wait]:
    """Time one action several times from the same start."""
    times = []
    for _ in range(REPEATS):
        browser.open(f"{address}{action.hash}")
        browser.wait_for(f"{CHART} || {COUNT}")
        browser.evaluate("new Promise((done) => setTimeout(done, 300))")  # let the page finish loading
        before = busy_ms(browser)
        wall_ms = browser.evaluate(
            f"(async () => {{ {DRAWN} const start = performance.now(); {action.do};"
            f" return await drawn(() => {action.ready}) - start; }})()"
        )
        times.append(Wait(wall_ms=wall_ms, busy_ms=busy_ms(browser) - before))
    return times


def openings(browser: Browser, address: str, ready: str) -> list[Wait]:
    """Time the opening of a page several times, from the start of the navigation until it is drawn."""
    times = []
    for _ in range(REPEATS):
        browser.open(address)
        browser.wait_for(f"location.href === {address!r}")
        wall_ms = browser.evaluate(f"(async () => {{ {DRAWN} return drawn(() => {ready}); }})()")
        times.append(Wait(wall_ms=wall_ms, busy_ms=busy_ms(browser)))
    return times


def busy_ms(browser: Browser) -> float:
    """CPU time in ms that the page's thread has spent on scripts, styles and layout since the page was opened."""
    metrics = browser.protocol.send("Performance.getMetrics")["metrics"]
    seconds: float = next(each["value"] for each in metrics if each["name"] == "TaskDuration")
    return 1000 * seconds


def table_of(browser: Browser, one: Path, other: Path, short: Path, steps: int) -> Table:
    """Table of medians over the repeats, with least and worst waits: other programs can only lengthen a wait."""
    rows: list[tuple[str, ...]] = []

    def add(name: str, waits: list[Wait]) -> None:
        walls, busy = [each.wall_ms for each in waits], [each.busy_ms for each in waits]
        rows.append((name, *(f"{of:.0f}" for of in (median(walls), min(walls), max(walls), median(busy)))))

    newest = f"{PLACE}?.includes('step {steps:,} ')"
    both = "document.querySelectorAll('.group .question').length === 2"
    with served(one) as address:
        add("open: curves", openings(browser, f"{address}#curves", CHART))
        add("open: samples", openings(browser, f"{address}#samples", newest))
        for action in actions(steps):
            add(action.name, waits(browser, address, action))
    with served(short) as address:
        add("open: a drawing, no page", openings(browser, f"{address}icon.svg#", "true"))
        add(f"open: curves of {SHORT} steps", openings(browser, f"{address}#curves", CHART))
        add(f"open: samples of {SHORT} steps", openings(browser, f"{address}#samples", PLACE))
    with served(one, other) as address:
        add("open: two runs, curves", openings(browser, f"{address}#curves", CHART))
        add("open: two runs, samples", openings(browser, f"{address}#samples", both))
        step = Action(
            name="two runs: the step before", do=key("["), ready=f"{PLACE}?.includes('step {steps - 1:,} ') && {both}"
        )
        add(step.name, waits(browser, address, step))
    headers = ("action", "wait ms", "least ms", "worst ms", "busy ms")
    return as_table(f"fovea view of {steps:,} steps, {GROUPS * steps:,} groups", headers, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    steps = parser.parse_args().steps
    with TemporaryDirectory() as parent:
        one, other, short = (Path(parent, name) for name in ("one", "other", "short"))
        for folder, length in ((one, steps), (other, steps), (short, SHORT)):
            make_run(folder, length)
        with open_browser() as browser:
            browser.protocol.send("Performance.enable", {"timeDomain": "threadTicks"})
            show(table_of(browser, one, other, short, steps))


if __name__ == "__main__":
    main()
