"""In a real browser: axes of curves, held-out figures and answers, settings and console, and the list of runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fovea.metrics.log import JsonlSink, MetricsLog
from fovea.metrics.progress import Progress
from fovea.report.about import add_hint
from fovea.report.export import export
from fovea.report.viewed_run import ViewedRun
from tests.chromium import Browser, open_browser
from tests.report.folders import finish_run, write_answers_of, write_run
from tests.view.browsing import GROUP, HOSTILE, LINE, choose, open_page, opened, served, text_of

pytestmark = pytest.mark.browser

X_LABELS = "[...document.querySelector('.plot').querySelectorAll('text.x')].map((each) => each.textContent)"
Y_LABELS = "[...document.querySelector('.plot').querySelectorAll('text:not(.x)')].map((each) => each.textContent)"
TITLES = "[...document.querySelectorAll('.metrics[open] .charts figcaption bdi')].map((each) => each.textContent)"
OVERVIEW = TITLES.replace(".metrics[open] ", "")
FITS = "document.documentElement.scrollWidth <= innerWidth"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.mark.parametrize("steps", [2, 8, 30, 90, 95, 99, 600, 1000, 12_345, 1_234_567])
def test_the_x_axis_has_some_ticks_and_not_too_many(browser: Browser, tmp_path: Path, steps: int) -> None:
    folder = write_run(tmp_path / "run", steps=1)
    JsonlSink(folder, resume_step=1).write(steps, {"reward": 0.9})
    with served(folder) as address:
        open_page(browser, f"{address}#curves", LINE)
        labels = browser.evaluate(X_LABELS)
        assert 2 <= len(labels) <= 8, labels
        assert len(set(labels)) == len(labels)


@pytest.mark.parametrize("width", [320, 400, 1280])
def test_no_number_lies_outside_its_card(browser: Browser, tmp_path: Path, width: int) -> None:
    folders = [write_run(tmp_path / f"run{number}") for number in range(6)]
    values = (-1.234e-9, 987_654.3, -98_765.4, 1e-300, 123_456_789.0, -0.000123)
    for folder in folders:
        with MetricsLog([JsonlSink(folder, resume_step=5)]) as metrics:
            for step, factor in ((6, 1.0), (1_234_567, 1.1)):
                named = {f"metric of a rather long name {place}": value * factor for place, value in enumerate(values)}
                metrics.write(step, named | ({"reward": -98_765.4} if step == 6 else {}))
    outside = """[...document.querySelectorAll('figure.chart')].flatMap((card) => {
        const box = card.getBoundingClientRect();
        return [...card.querySelectorAll('text, output span, bdi')].filter((each) => {
            const { left, right, top, bottom, width } = each.getBoundingClientRect();
            return width && (left < box.left || right > box.right || top < box.top || bottom > box.bottom);
        }).map((each) => each.textContent);
    })"""
    with served(*folders) as address:
        for place in ("", "?x=seconds", "?log=1"):
            open_page(browser, f"{address}#curves{place}", LINE, width=width)
            choose(browser, "#search", "e", "input")
            browser.wait_for("document.querySelectorAll('.charts polyline').length >= 12")
            assert browser.evaluate(outside) == []
            assert browser.evaluate(FITS)


def test_curves_by_time_and_tokens_on_a_log_scale_and_smoothed(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=0)
    with MetricsLog([JsonlSink(folder)]) as metrics:
        for step in range(1, 5):
            rewards = {"reward": 10.0**step, "loss": -1.0}
            metrics.write(step, rewards | {"seconds/step": 60.0 * step, "tokens_per_second": 100.0})
    points = f"{LINE}.getAttribute('points').split(' ').map((each) => each.split(',').map(Number))"
    with opened(browser, "#curves", LINE, folder):
        width = browser.evaluate("document.querySelector('.plot').clientWidth") - 66
        steps = [56 + width * share for share in (0, 1 / 3, 2 / 3, 1)]
        assert [x for x, _ in browser.evaluate(points)] == pytest.approx(steps, abs=0.1)
        choose(browser, "#x", "seconds")
        browser.wait_for(f"{X_LABELS}.includes('5 min')")
        by_time = [56 + width * share for share in (0.1, 0.3, 0.6, 1)]
        assert [x for x, _ in browser.evaluate(points)] == pytest.approx(by_time, abs=0.1)
        browser.point_at(".plot")
        browser.wait_for("document.querySelector('#pointed').textContent.endsWith(' min')")
        assert text_of(browser, ".charts output") == "100", "of the nearest step: 3 min of 10"
        choose(browser, "#x", "tokens")
        browser.wait_for(f"{X_LABELS}.includes('20k')")
        assert [x for x, _ in browser.evaluate(points)] == pytest.approx(by_time, abs=0.1)
        browser.evaluate("document.querySelector('#log').click()")
        browser.wait_for(f"{Y_LABELS}.join() === '10,100,1,000,10k'")
        heights = [y for _, y in browser.evaluate(points)]
        assert heights == pytest.approx([130, 130 - 122 / 3, 130 - 244 / 3, 8], abs=0.1)
        choose(browser, "#smooth", "0.5")
        browser.wait_for("document.querySelector('.plot').querySelectorAll('polyline').length === 2")
        raw, smooth = (
            [y for _, y in browser.evaluate(points.replace("polyline", each))]
            for each in ("polyline.faded", "polyline:not(.faded)")
        )
        assert raw == pytest.approx(heights)
        # (0.5 * 10 + 100) / 1.5 = 70: of the averages of TensorBoard
        assert smooth[1] == pytest.approx(130 - 122 / 3 * math.log10(7), abs=0.1)
        browser.press("s")
        browser.press("c")
        browser.wait_for(f"{LINE} && document.querySelector('#x').value === 'tokens'")
        choose(browser, "#search", "loss", "input")
        browser.wait_for("document.querySelector('.charts output')?.textContent === '\u22121'")
        drawn = "document.querySelector('.charts .plot').childElementCount"
        assert browser.evaluate(drawn) == 0, "nothing above 0 on a log scale"


def test_no_line_crosses_missing_steps_and_rounding_has_no_curve(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=0)
    with MetricsLog([JsonlSink(folder)]) as metrics:
        for step in range(1, 13):
            missing = step in (4, 5, 7)
            values = {} if missing else {"reward": 0.1 * step, "mismatch/kl": 1e-14}
            metrics.write(step, {"entropy": 1.0, "loss": 1.0} | values)
    spans = f"{LINE}.parentNode.querySelectorAll('polyline')"
    with opened(browser, "#curves", LINE, folder):
        lengths = browser.evaluate(f"[...{spans}].map((each) => each.getAttribute('points').split(' ').length)")
        assert lengths == [3, 1, 5]
        assert browser.evaluate(TITLES) == ["reward", "entropy"]


def test_the_overview_has_remarks_figures_and_the_learning_curve(browser: Browser, tmp_path: Path) -> None:
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "other")
    for folder in (one, other):
        JsonlSink(folder, resume_step=5).write(6, {"reward": 0.9, "reward/same": 0.9, "accuracy/dev": 0.5})
    headline = "[...document.querySelectorAll('.headline-of dd:not(.soft)')].map((each) => each.textContent)"
    with opened(browser, "", LINE, one, other):
        assert browser.evaluate(OVERVIEW) == ["reward", "accuracy/dev"]
        assert browser.evaluate(headline) == ["0.100", "0.900"] * 2, "so far"
        assert not browser.evaluate("document.querySelector('.remarks')")
        add_hint(one, f"{HOSTILE[:60]} no group had a signal")
        finish_run(one, right=3, wrong=1)
        finish_run(other, right=1, wrong=3, unscored=2)
        browser.wait_for(f"document.querySelector('.remarks') && {headline}.join() === '0.0 %,75.0 %,0.0 %,25.0 %'")
        assert text_of(browser, ".remarks") == f"one {HOSTILE[:60]} no group had a signal"
        row = "[...document.querySelector('.figures-table tbody tr').cells].map((cell) => cell.textContent)"
        before, after, n = "0.0 [0, 49]", ("75.0 [30, 95]", "25.0 [5, 70]"), "4"
        assert browser.evaluate(row) == ["all", before, after[0], before, after[1], n, ""]
        assert browser.evaluate("document.querySelectorAll('.figures-table .to').length") >= 2, "a bar for each run"
        assert "0.0 % right with another question's image" in text_of(browser, ".headlines")
        assert "Rows not scored and left out: 2 after RL." in text_of(browser, ".headlines")
        assert "Time of the steps" in text_of(browser, ".overview")
        assert browser.evaluate(FITS)
        browser.evaluate("document.querySelector('.plot').dispatchEvent(new MouseEvent('click', { bubbles: true }))")
        browser.wait_for(GROUP)


def test_the_overview_says_why_a_run_does_not_move(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=0)
    (folder / "config.yaml").write_text(yaml.safe_dump({"rollout": {"max_new_tokens": HOSTILE[:30]}}))
    sink = JsonlSink(folder)
    for step in range(1, 20):
        sink.write(step, {"reward": 0.0, "truncated_frac": 1.0})
    with opened(browser, "", LINE, folder):
        assert not browser.evaluate("document.querySelector('.remarks')"), "one step too few"
        sink.write(20, {"reward": 0.0, "truncated_frac": 1.0})
        browser.wait_for("document.querySelectorAll('.remarks p').length === 2")
        assert browser.evaluate(OVERVIEW) == ["reward", "truncated_frac"], "with the curve that shows it"
        said = text_of(browser, ".remarks")
        assert "No answer earns anything: reward is 0 (mean of steps 1 to 20). Nothing is learned" in said
        assert "Answers are cut off at the limit: truncated_frac is 1 (mean of steps 1 to 20)" in said
        assert f"rollout.max_new_tokens={HOSTILE[:30].lower()}" in said


def test_a_part_of_the_reward_that_repeats_it_is_shown_once(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=0, text="same")
    parts = "[...document.querySelectorAll('.score .part')].map((each) => each.textContent)"
    with MetricsLog([JsonlSink(folder)]) as metrics:
        for step in range(1, 4):
            metrics.write(step, {"reward": step / 4, "reward/same": step / 4, "reward/other": 1.0})
        with served(folder) as address:
            open_page(browser, f"{address}#curves", LINE)
            assert browser.evaluate(TITLES) == ["reward", "reward/other"]
            browser.press("s")
            browser.wait_for(GROUP)
            assert browser.evaluate(parts) == ["image 1 seen 1"]
            browser.press("c")
            metrics.write(4, {"reward": 0.5, "reward/same": 0.25, "reward/other": 1.0})
            browser.wait_for(f"{TITLES}.includes('reward/same')")
            assert browser.problems == []


def test_held_out_answers_of_two_runs_stand_beside_each_other(browser: Browser, tmp_path: Path) -> None:
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "other")
    texts = {one: ["3", "3", "4", HOSTILE, "3"], other: ["3", "4", "3", "5"]}
    for folder, answers in texts.items():
        write_answers_of(folder, "test-final", answers, question=HOSTILE)
        write_answers_of(folder, "dev-step-000002", ["4"])
    rows = """[...document.querySelectorAll('.held-out')].map((row) => [
        row.querySelector('.place').textContent.split(' ')[0],
        ...[...row.querySelectorAll('.answer')].map((each) => each.classList.contains('right'))])"""
    figures = "[...document.querySelectorAll('.tally dd')].map((each) => each.textContent)"
    with served(one, other) as address:
        open_page(browser, f"{address}#curves", LINE)
        browser.press("e")
        browser.wait_for("document.querySelectorAll('.held-out').length === 5")
        assert browser.evaluate(rows) == [
            ["test/0", True, True],
            ["test/1", True, False],
            ["test/2", False, True],
            ["test/3", False, False],
            ["test/4", True, False],
        ]
        shares = browser.evaluate(figures)
        assert shares == ["50.0\u00a0%", "50.0\u00a0%", "1", "1", "1", "1", "4"], "over the rows of both"
        assert text_of(browser, ".held-out .question").startswith(HOSTILE[:2000])
        assert "has not answered this row" in text_of(browser, ".held-out:last-child")
        assert browser.evaluate("document.querySelectorAll('.held-out a, body script').length") == 0
        assert browser.evaluate(FITS)
        choose(browser, "#outcome", "differ")
        browser.wait_for("document.querySelectorAll('.held-out').length === 3")
        choose(browser, "#row-kind", "count")
        browser.wait_for(f"{rows}.map(([id]) => id).join() === 'test/1'")
        choose(browser, "#evaluation", "dev-step-000002")
        choose(browser, "#outcome", "")
        choose(browser, "#row-kind", "")
        browser.wait_for(f"{figures}.join() === '0.0\u00a0%,0.0\u00a0%,0,0,0,1,1'")
        write_answers_of(one, "dev-step-000004", ["3"])
        browser.wait_for("document.querySelector('#evaluation').options.length === 3")
        page = export([ViewedRun(one), ViewedRun(other)], tmp_path / "out.html")
        open_page(browser, f"{page.as_uri()}#held-out?outcome=right", "document.querySelector('.held-out')")
        assert browser.evaluate(rows) == [["test/0", True, True]]
        open_page(browser, f"{page.as_uri()}#held-out", "document.querySelector('.held-out')", width=400)
        assert browser.evaluate(FITS)
        assert browser.problems == []


def test_many_held_out_rows_come_in_parts(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    write_answers_of(folder, "test-final", ["3"] * 100)
    shown = "document.querySelectorAll('.held-out').length"
    with served(folder) as address:
        open_page(browser, f"{address}#held-out", f"{shown} === 40")
        for number in (80, 100):
            browser.evaluate("document.querySelector('.page > div:last-child > button').click()")
            browser.wait_for(f"{shown} === {number}")
        assert not browser.evaluate("document.querySelector('.page > div:last-child > button')")


def test_settings_that_differ_come_first_and_the_console_grows(browser: Browser, tmp_path: Path) -> None:
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "other")
    (other / "config.yaml").write_text((other / "config.yaml").read_text().replace("seed: 0", "seed: 7"))
    first = "[...document.querySelector('.settings tbody tr').cells].map((cell) => cell.textContent)"
    with served(one, other) as address, Progress(1, 0, False, transcript=one / "console.txt") as progress:
        progress.print(HOSTILE)
        open_page(browser, f"{address}#settings", "document.querySelector('.settings tbody tr')")
        assert browser.evaluate(first) == ["seed", "0", "7"]
        assert browser.evaluate("document.querySelectorAll('.settings .differs').length") == 1
        assert "xxxx" in text_of(browser, "pre.console")
        assert browser.evaluate("document.querySelectorAll('pre.console *').length") == 0
        progress.print("the last line")
        browser.wait_for("document.querySelector('pre.console').textContent.endsWith('the last line\\n')")
        other_console = "[...document.querySelectorAll('pre.console')][1].textContent"
        assert browser.evaluate(other_console).startswith("This run did not")
        assert browser.evaluate(FITS)
        assert browser.problems == []


def test_a_folder_of_runs_opens_a_list_and_leads_to_its_runs(browser: Browser, tmp_path: Path) -> None:
    for name in ("one", "other"):
        write_run(tmp_path / "runs" / name)
    (tmp_path / "runs" / "latest").symlink_to(tmp_path / "runs" / "one")
    rows = "[...document.querySelectorAll('tbody tr')].map((row) => row.textContent.replaceAll(/\\s+/g, ' '))"
    with opened(browser, "", "document.querySelectorAll('tbody tr').length === 2", tmp_path / "runs", width=400):
        assert all("stopped 5 of 10 0.5" in row for row in browser.evaluate(rows))
        assert browser.evaluate(FITS)
        browser.evaluate("document.querySelector('tbody a').click()")
        browser.wait_for(LINE)
        browser.evaluate("document.querySelector('#head h1 a').click()")
        browser.wait_for("document.querySelectorAll('tbody tr').length === 2")
        browser.evaluate("document.querySelectorAll('tbody input').forEach((box) => box.click())")
        browser.evaluate("document.querySelector('form button').click()")
        browser.wait_for("document.querySelectorAll('.run').length === 2")
        browser.press("s")
        browser.wait_for("document.querySelector('.images img')?.naturalWidth")
