"""The live display of a run, in a terminal and in a notebook."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
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


def lines(console: Console) -> list[str]:
    return console.file.getvalue().splitlines()


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def run(*, num_steps: int, step_s: float, start_step: int = 0) -> list[str]:
    console, clock = plain_console(), Clock()
    with Progress(num_steps, start_step, True, console, clock) as progress:
        for step in range(start_step + 1, num_steps + 1):
            clock.now_s += step_s
            progress.step(step, METRICS)
    return lines(console)


def test_a_plain_line_has_the_figures() -> None:
    (first, *_) = run(num_steps=100, step_s=0)
    assert first == "step 1/100  reward 0.500  signal 62%  accuracy 0.250  length 5.2  12,346 tok/s  3:18 left"


def numbers(found: list[str]) -> list[int]:
    return [int(line.split()[1].split("/")[0].replace(",", "")) for line in found]


def test_fast_steps_give_a_line_per_tenth() -> None:
    assert numbers(run(num_steps=1000, step_s=0.001)) == [*range(1, 1000, 100), 1000]


def test_slow_steps_give_a_line_every_five_seconds() -> None:
    assert numbers(run(num_steps=1000, step_s=0.5))[:4] == [1, 11, 21, 31]


def test_a_resumed_run_goes_on_from_its_step() -> None:
    assert numbers(run(num_steps=1000, step_s=0.001, start_step=900)) == [901, 1000]


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
    console, clock = plain_console(), Clock()
    with Progress(10, 0, True, console, clock) as progress:
        progress.stage("making the model")
        for step in range(1, 801):
            clock.now_s += 0.0625
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
def test_a_warning_is_printed_once_with_a_display_and_without(
    enabled: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress(2, 0, enabled, console := plain_console()) as progress:
        progress.warn("step-6 is damaged")
    assert lines(console) == (["step-6 is damaged"] if enabled else [])
    assert capsys.readouterr().err == ("" if enabled else "step-6 is damaged\n")


def test_the_live_display_has_a_bar_and_figures() -> None:
    console = terminal()
    with Progress(100, 0, True, console) as progress:
        progress.stage("making the model")
        console.print(progress._render())
        progress.step(25, METRICS)
    text = console.file.getvalue()
    assert "making the model" in text
    assert "step 25/100" in text
    assert "━" in text
    assert "reward 0.500  signal 62%  accuracy 0.250  length 5.2  12,346 tok/s" in text
    assert "2:30 left" in text
    assert text.endswith("\x1b[?25h"), "the cursor is shown again"


def test_prints_above_the_live_display() -> None:
    console = terminal()
    with Progress(100, 0, True, console) as progress:
        progress.step(1, METRICS)
        progress.print("a [table] of [/numbers]")
    text = console.file.getvalue()
    assert text.index("a [table] of [/numbers]") < text.rindex("step 1/100")


def test_a_long_string_is_not_broken() -> None:
    console = plain_console()
    with Progress(1, 0, True, console) as progress:
        progress.print("report: " + "folder/" * 20)
    assert lines(console) == ["report: " + "folder/" * 20]


def test_stage_text_is_not_markup() -> None:
    console = plain_console()
    with Progress(1, 0, True, console) as progress:
        progress.stage("reading [/x].parquet")
    assert lines(console) == ["reading [/x].parquet"]


def test_an_error_ends_the_live_display() -> None:
    console = terminal()
    with pytest.raises(RuntimeError), Progress(1, 0, True, console):
        raise RuntimeError
    assert console.file.getvalue().endswith("\x1b[?25h")


def test_the_file_has_the_lines_whatever_the_terminal_shows(tmp_path: Path) -> None:
    file = tmp_path / "console.txt"
    for console, enabled in ((terminal(), True), (plain_console(), False)):
        file.unlink(missing_ok=True)
        clock = Clock()
        with Progress(2, 0, enabled, console, clock, transcript=file) as progress:
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

    def publish(
        self, data: Mapping[str, str], *, transient: Mapping[str, str] | None = None, update: bool = False
    ) -> None:
        assert transient is not None
        assert update == (transient["display_id"] in self.outputs)
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
