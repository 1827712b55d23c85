"""The live display of a run, in a terminal and in a notebook."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console
from rich.table import Table

from fovea.metrics.progress import MAX_POINTS, NotebookDisplay, Progress, notebook_publisher

METRICS = {
    "reward": 0.5,
    "accuracy": 0.25,
    "response_tokens_mean": 5.25,
    "groups/without_signal_frac": 0.375,
    "tokens_per_second": 12345.6,
    "seconds/step": 2.0,
}


def plain_console() -> Console:
    return Console(file=io.StringIO(), width=80, force_terminal=False, _environ={})


def terminal() -> Console:
    return Console(file=io.StringIO(), width=90, force_terminal=True, _environ={"TERM": "xterm"})


def until_shown(console: Console, text: str) -> None:
    """Wait for the display, which draws itself four times a second."""
    deadline = time.monotonic() + 30
    while text not in console.file.getvalue():  # type: ignore[attr-defined]
        assert time.monotonic() < deadline, f"{text} is not shown"
        time.sleep(0.01)


def lines(console: Console) -> list[str]:
    return console.file.getvalue().splitlines()


def run(*, num_steps: int, step_s: float, start_step: int = 0) -> list[str]:
    console, now_s = plain_console(), [0.0]
    with Progress(num_steps, start_step, True, console, lambda: now_s[0]) as progress:
        for step in range(start_step + 1, num_steps + 1):
            now_s[0] += step_s
            progress.step(step, METRICS)
    return lines(console)


def test_a_plain_line_has_the_figures() -> None:
    (first, *_) = run(num_steps=100, step_s=0)
    assert first == "step 1/100  reward 0.500  signal 62%  accuracy 0.250  length 5.2  12,346 tok/s  3:18 left"


@pytest.mark.parametrize(
    ("step_s", "start_step", "printed"),
    [
        (0.001, 0, [*range(1, 1000, 100), 1000]),  # a line per tenth
        (0.5, 0, [*range(1, 1000, 10), 1000]),  # one every five seconds
        (0.001, 900, [901, 1000]),
    ],
    ids=["fast steps", "slow steps", "resumed"],
)
def test_lines_are_few(step_s: float, start_step: int, printed: list[int]) -> None:
    found = run(num_steps=1000, step_s=step_s, start_step=start_step)
    assert [int(line.split()[1].split("/")[0].replace(",", "")) for line in found] == printed


def test_time_left_follows_a_moving_average() -> None:
    console = plain_console()
    with Progress(101, 0, True, console) as progress:
        progress.step(1, METRICS | {"seconds/step": 60.0})
        progress.step(101, METRICS | {"seconds/step": 10.0})
    assert lines(console)[0].endswith("  1:40:00 left")
    with Progress(100, 0, True, console := plain_console(), lambda: 0) as progress:
        progress.step(1, {"seconds/step": 1.0})
        progress.step(60, {"seconds/step": 11.0})  # 1 + 0.1 (11 - 1) = 2 s, 40 steps left
    assert lines(console)[-1].endswith("  1:20 left")


def test_a_reading_stays_until_the_next() -> None:
    console = plain_console()
    with Progress(2, 0, True, console) as progress:
        progress.step(1, METRICS | {"accuracy/dev": 0.875})
        progress.step(2, METRICS)
    assert all("  dev 0.875 (step 1)  " in line for line in lines(console))


def test_stages_print_when_they_change_or_are_late() -> None:
    console, now_s = plain_console(), [0.0]
    with Progress(10, 0, True, console, lambda: now_s[0]) as progress:
        progress.stage("making the model")
        for step in range(1, 801):
            now_s[0] += 0.0625
            progress.stage(f"warm-up {step}/800")
    assert lines(console) == ["making the model", *(f"warm-up {step}/800" for step in range(1, 801, 80))]


@pytest.mark.parametrize("console", [plain_console(), terminal()])
def test_disabled_prints_nothing(console: Console) -> None:
    with Progress(2, 0, False, console) as progress:
        progress.stage("making the model")
        progress.step(1, METRICS)
        progress.print("table")
    assert lines(console) == []


@pytest.mark.parametrize("enabled", [True, False])
def test_a_warning_is_printed_once_with_or_without_display(enabled: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(2, 0, enabled, console := plain_console()) as progress:
        progress.warn("step-6 is damaged")
    assert lines(console) == (["step-6 is damaged"] if enabled else [])
    assert capsys.readouterr().err == ("" if enabled else "step-6 is damaged\n")


def test_the_live_display_has_a_bar_and_figures_below_what_is_printed() -> None:
    console = terminal()
    with suppress(RuntimeError), Progress(100, 0, True, console) as progress:
        progress.stage("making the model")
        until_shown(console, "making the model")
        progress.step(25, METRICS)
        progress.print("a [table] of [/numbers]")
        raise RuntimeError
    text = console.file.getvalue()
    figures = "reward 0.500  signal 62%  accuracy 0.250  length 5.2  12,346 tok/s"
    assert all(part in text for part in ("making the model", "━", figures, "2:30 left"))
    assert text.index("a [table] of [/numbers]") < text.rindex("step 25/100")
    assert text.endswith("\x1b[?25h"), "the cursor is shown again"


def test_texts_are_no_markup_and_are_not_broken() -> None:
    console = plain_console()
    with Progress(1, 0, True, console) as progress:
        progress.print("report: " + "folder/" * 20)
        progress.stage("reading [/x].parquet")
    assert lines(console) == ["report: " + "folder/" * 20, "reading [/x].parquet"]


def test_the_file_has_the_lines_whatever_the_terminal_shows(tmp_path: Path) -> None:
    file = tmp_path / "console.txt"
    for console, enabled in ((terminal(), True), (plain_console(), False)):
        file.unlink(missing_ok=True)
        with Progress(2, 0, enabled, console, lambda: 0.0, transcript=file) as progress:
            progress.stage("making the model")
            progress.print("https://me:word@host/x " + "folder/" * 30 + " \ud800[/x]\x1b[2J")
            progress.step(1, METRICS)
            progress.print(Table("a"))
        stage, line, step, *table = file.read_text().splitlines()
        assert stage == "making the model"
        assert line == "https://***@host/x " + "folder/" * 30 + " ?[/x]\N{REPLACEMENT CHARACTER}[2J"
        assert step.startswith("step 1/2  reward 0.500  signal 62%")
        assert "┃ a ┃" in table


def test_a_resumed_run_goes_on_in_its_file_and_an_error_ends_it(tmp_path: Path) -> None:
    file = tmp_path / "console.txt"
    for number in range(2):
        progress = Progress(1, 0, False, transcript=file)
        progress.print(f"start {number}")
        with pytest.raises(ValueError, match="such row"), progress:
            raise ValueError("no \x1b[2J such row")
    ended = "ended by ValueError: no \N{REPLACEMENT CHARACTER}[2J such row"
    assert file.read_text().splitlines() == ["start 0", ended, "start 1", ended]


def test_a_file_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (tmp_path / "console.txt").symlink_to(outside)
    for file in (tmp_path / "console.txt", tmp_path / "gone" / "console.txt"):
        with Progress(1, 0, True, console := plain_console(), transcript=file) as progress:
            progress.print("start")
        assert lines(console) == ["start"]
    assert not outside.exists()


class Cell:
    """Outputs of a cell by display id, as a front end keeps them."""

    def __init__(self) -> None:
        self.outputs: dict[str, Mapping[str, str]] = {}
        self.updates = 0

    def publish(self, data: Mapping[str, str], *, transient: Mapping[str, str], update: bool = False) -> None:
        self.outputs[transient["display_id"]] = data
        self.updates += 1

    @property
    def html(self) -> str:
        (output,) = self.outputs.values()
        return output["text/html"]


def test_a_run_is_one_output_that_says_what_is_new() -> None:
    cell, now = Cell(), [0.0]
    display = NotebookDisplay(cell, 1000, clock=lambda: now[0])
    display.stage("loading <b>the model</b>")
    assert "loading &lt;b&gt;the model&lt;/b&gt;" in cell.html
    for step in range(1, 1001):
        now[0] += 0.01
        display.step(step, {"reward": math.nan if step == 7 else step / 1000}, {"reward": f"r {step}"}, "0:01 left")
    assert cell.updates <= 21, "twice a second"
    display.close()
    assert 'max="1000" value="1000"' in cell.html
    assert "r 1000" in cell.html
    assert "loading" not in cell.html
    root = ElementTree.fromstring(f"<div>{cell.html.replace('&emsp;', ' ').replace('<br>', '<br/>')}</div>")
    (line,) = root.iter("polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert MAX_POINTS / 2 <= len(points) <= MAX_POINTS
    assert points == sorted(points), "steps go to the right"
    assert [y for _, y in points] == sorted((y for _, y in points), reverse=True), "a growing reward goes up"
    assert (points[0][0], points[-1][0]) == (0, 420)


def test_this_process_is_no_kernel() -> None:
    assert notebook_publisher() is None
