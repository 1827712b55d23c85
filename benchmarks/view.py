"""How long the page of `fovea view` waits for each of its requests, on a run of 10,000 recorded steps.

    python -m benchmarks.view --steps 10000

The run folder is made up: 80 metrics per step, and a record of 4 groups of 8 answers with 300 tokens for every step.
Requests go through the whole application, from the path to the bytes of the answer, but not over a socket.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

from rich.console import Console
from rich.table import Table
from starlette.testclient import TestClient

from fovea.config.loading import dump_config
from fovea.config.model import Model, TinyModel
from fovea.config.run import Config
from fovea.evaluation.answer import SampledAnswer
from fovea.metrics.jsonl import METRICS_FILE
from fovea.report.about import CONFIG_FILE
from fovea.report.record_json import record_to_json, summary_to_json
from fovea.report.records import (
    RecordedAnswer,
    RecordedMessage,
    RecordedTurn,
    SampleRecord,
    TokenTrace,
    summary_of,
)
from fovea.report.samples import INDEX_FILE, samples_folder, step_path
from fovea.report.viewed_run import ViewedRun
from fovea.view.server import make_app

METRICS, GROUPS, ANSWERS, TOKENS = 80, 4, 8, 300
REPEATS = 9


def make_run(folder: Path, steps: int) -> None:
    """Write a run folder of so many steps, all of them recorded."""
    samples_folder(folder).mkdir(parents=True)
    config = Config(max_steps=steps, model=Model(tiny=TinyModel()))
    (folder / CONFIG_FILE).write_text(dump_config(config), encoding="utf-8")
    with (folder / METRICS_FILE).open("w", encoding="utf-8") as metrics:
        metrics.writelines(metrics_line(step) for step in range(1, steps + 1))
    records = [_record(place) for place in range(GROUPS)]
    content = "".join(json.dumps(record_to_json(record)) + "\n" for record in records)
    summaries = [summary_to_json(summary_of(record)) for record in records]
    with (samples_folder(folder) / INDEX_FILE).open("w", encoding="utf-8") as index:
        index.writelines(json.dumps({"step": step, "groups": summaries}) + "\n" for step in range(1, steps + 1))
    first = step_path(folder, 1)
    first.write_text(content, encoding="utf-8")
    for step in range(2, steps + 1):
        step_path(folder, step).hardlink_to(first)  # a gigabyte otherwise


def metrics_line(step: int) -> str:
    """A line of metrics.jsonl."""
    values = {f"metric/{number}": math.sin(step / (50 + number)) for number in range(METRICS)}
    return json.dumps({"step": step, "reward": step / 1e4} | values) + "\n"


def _record(place: int) -> SampleRecord:
    prompt = f"How many circles are in picture {place}?"
    tokens = TokenTrace(
        pieces=(" token",) * TOKENS,
        engine_logprobs=(-0.1234,) * TOKENS,
        trainer_logprobs=(-0.1235,) * TOKENS,
        advantages=(0.5401,) * TOKENS,
    )
    text = " token" * TOKENS
    answer = RecordedAnswer(
        score=SampledAnswer(text=text, reward=1.0, accuracy=1.0, parts={"format": 1.0}),
        turns=(RecordedTurn(text=text, tokens=tokens),),
    )
    return SampleRecord(
        id=f"train/{place}",
        prompt=prompt,
        truth="3",
        kind=f"kind {place}",
        messages=(RecordedMessage(role="user", parts=(prompt,)),),
        answers=(answer,) * ANSWERS,
    )


def table_of(folder: Path, steps: int) -> Table:
    """Times of the requests of a page on this run, in the order in which it makes them."""
    table = Table(title=f"fovea view of {steps:,} steps", title_justify="left")
    for header in ("request", "median ms", "worst ms", "KiB"):
        table.add_column(header, justify="left" if header == "request" else "right")

    started = perf_counter()
    run = ViewedRun(folder)
    opened_ms = 1000 * (perf_counter() - started)
    table.add_row("opening the run, before the page", f"{opened_ms:.0f}", f"{opened_ms:.0f}", "")
    client = TestClient(make_app([run]), base_url="http://127.0.0.1")

    def append(number: int) -> None:
        with (folder / METRICS_FILE).open("a", encoding="utf-8") as metrics:
            metrics.write(metrics_line(steps + number + 1))

    nothing: Callable[[int], None] = lambda _number: None  # noqa: E731
    for name, path, before in (
        ("poll, with nothing new", "/data/runs", nothing),
        ("poll, with a new step", "/data/runs", append),
        ("a curve", "/data/curve/0/7", nothing),
        ("the index of all groups, once", "/data/entries/0/0", nothing),
        ("the index, later", f"/data/entries/0/{steps - 1}", nothing),
        ("the groups of a step", f"/data/step/0/{steps // 2}", nothing),
    ):
        table.add_row(name, *_timed(client, path, before))
    return table


def _timed(client: TestClient, path: str, before: Callable[[int], None]) -> tuple[str, str, str]:
    times_ms, num_bytes = [], 0
    for number in range(REPEATS):
        before(number)
        started = perf_counter()
        answer = client.get(path)
        times_ms.append(1000 * (perf_counter() - started))
        assert answer.status_code == 200, answer.text
        num_bytes = len(answer.content)
    return f"{median(times_ms):.1f}", f"{max(times_ms):.1f}", f"{num_bytes / 1024:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    steps = parser.parse_args().steps
    with TemporaryDirectory() as parent:
        folder = Path(parent, "run")
        make_run(folder, steps)
        Console().print(table_of(folder, steps))


if __name__ == "__main__":
    main()
