"""The page in a real browser: live, by keyboard, with hostile text, exported, and of a run that was trained."""

from __future__ import annotations

import math
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from fovea.config.loading import load_config
from fovea.evaluation.records import RecordedImage, RecordedMessage, RecordedTurn
from fovea.loop import train
from fovea.metrics.log import JsonlSink, MetricsLog
from fovea.report.export import export
from fovea.report.images import png_bytes, write_image
from fovea.report.samples import write_samples
from fovea.report.viewed_run import ViewedRun
from fovea.wiring.run import build
from fovea_gym.types import Mark
from tests.chromium import Browser, open_browser
from tests.report.folders import group, image_in, write_run
from tests.view.browsing import GROUP, HOSTILE, LINE, choose, open_page, opened, served, text_of

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
TRAINING = [
    *("max_steps=2", "environment.train_size=24", "environment.dev_size=4", "environment.test_size=4"),
    *("warmup.max_steps=2", "warmup.check_every_steps=2", "rollout.prompts_per_step=3", "rollout.samples_per_prompt=4"),
    *("rollout.max_new_tokens=8", "log.samples_every_steps=1", "log.tensorboard=false", "log.progress=false"),
    *("checkpoint.every_steps=0", "evaluate.before_training=false", "evaluate.image_controls=false"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux answers on all of 127.0.0.0/8 by itself")
def test_the_server_listens_on_one_address(tmp_path: Path) -> None:
    """One that listened on all addresses of the machine would take this connection."""
    with served(write_run(tmp_path / "run")) as address:
        port = int(address.rstrip("/").rpartition(":")[2])
        socket.create_connection(("127.0.0.1", port)).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port))


@pytest.mark.smoke
def test_curves_are_drawn_and_grow(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with opened(browser, "#curves", LINE, folder):
        points = f"{LINE}.getAttribute('points').split(' ').length"
        assert browser.evaluate(points) == 5
        JsonlSink(folder, resume_step=5).write(6, {"reward": 0.9})
        browser.wait_for(f"{points} === 6")
        assert "step 6 of 10" in text_of(browser, ".runs")
        browser.point_at(".plot")
        browser.wait_for("document.querySelector('#pointed').textContent.startsWith('step ')")


def test_a_value_of_an_earlier_step_says_so(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with MetricsLog([JsonlSink(folder, resume_step=5)]) as metrics:
        metrics.write(6, {"reward": 0.9, "entropy": 0.5})
        metrics.write(7, {"reward": 0.9})
    outputs = "[...document.querySelectorAll('.charts output')].map((each) => each.textContent)"
    with served(folder) as address:
        open_page(browser, f"{address}#curves", LINE)
        browser.wait_for(f"{outputs}.includes('0.5 at 6')")
        assert "0.9" in browser.evaluate(outputs), "of the newest step"


def test_numbers_are_those_of_the_browser(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    values = [0.0012346, 0.5, -0.25, 12.3456, 1234.5678, -98_765.4, 987_654.3, 0.00012, -2_345_678.0]
    JsonlSink(folder, resume_step=5).write(1_234_567, {f"a/{place}": value for place, value in enumerate(values)})
    with served(folder) as address:
        open_page(browser, f"{address}#curves", LINE)
        assert "step 1,234,567 of 10" in text_of(browser, ".runs")
        choose(browser, "#search", "a/", "input")
        outputs = "[...document.querySelectorAll('.charts output')].map((each) => each.textContent)"
        browser.wait_for(f"{outputs}.filter(Boolean).length === {len(values)}")
        plain = "Number(x.toPrecision(4)).toLocaleString('en', { maximumFractionDigits: 6 }).replace('-', '\u2212')"
        expected = browser.evaluate(f"{values[:7]}.map((x) => {plain})")
        assert expected[4:6] == ["1,235", "\u221298,770"]
        assert browser.evaluate(outputs) == [*expected, "1.20e\u22124", "\u22122.35e6"]


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("step=3", "step 2 · colour"),
        ("step=99", "step 4 · colour"),
        ("step=0", "step 1 · colour"),
        ("step=2&group=1", "step 2 · count"),
        ("step=2&group=7", "step 2 · colour"),
    ],
)
def test_of_a_step_without_groups_the_nearest_one_is_shown(
    browser: Browser, tmp_path: Path, place: str, shown: str
) -> None:
    with served(write_run(tmp_path / "run")) as address:
        open_page(browser, f"{address}#samples?{place}", GROUP)
        assert shown in text_of(browser, ".place")


def test_the_newest_step_is_asked_for_once_and_beside_the_index(browser: Browser, tmp_path: Path) -> None:
    asked = "performance.getEntriesByType('resource').map((each) => each.name.split('/data/')[1]).filter(Boolean)"
    folder = write_run(tmp_path / "run")
    with opened(browser, "#samples", GROUP, folder):
        assert browser.evaluate(asked)[:3] == ["runs", "step/0/4", "entries/0/0"]
        browser.press("[")
        browser.wait_for("document.querySelector('.place').textContent.includes('step 2')")
        write_samples(folder, 4, [group(image_in(folder), 0, "taken again")])
        browser.press("]")
        browser.wait_for("document.querySelector('.group').textContent.includes('taken again')")
        assert [path for path in browser.evaluate(asked) if path.startswith("step/")][:2] == ["step/0/4", "step/0/2"]


def test_a_group_is_reached_by_keys(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with opened(browser, "#curves", LINE, folder):
        browser.press("s")
        browser.wait_for(GROUP)
        assert "step 4 · colour · train/0" in text_of(browser, ".place"), "the newest step"
        for key, place in {"j": "step 4 · count", "[": "step 2 · colour", "k": "step 1 · count"}.items():
            browser.press(key)
            browser.wait_for(f"document.querySelector('.place').textContent.includes('{place}')")
        press = "document.body.dispatchEvent(new KeyboardEvent('keydown', { key: 'h', bubbles: true }));"
        browser.evaluate(press * 2)  # the second comes before the first is drawn
        browser.wait_for("document.querySelector('.token.below')")
        assert browser.evaluate("document.querySelector('.token.below').style.getPropertyValue('--heat')") == "100%"
        browser.point_at(".token.below")
        browser.wait_for("document.querySelector('.readout').textContent.includes('mismatch \\u22121')")
        browser.press("?")
        browser.wait_for("document.querySelector('dialog').open")


def hold_the_first(browser: Browser, path: str) -> None:
    """Keep back the page's next answer to a path with this beginning until `held()`."""
    browser.evaluate(f"""(() => {{
        const real = fetch;
        self.fetch = async (path) => {{
            const answer = await real(path);
            if (!self.held && path.startsWith("data/{path}")) await new Promise((go) => {{ self.held = go; }});
            return answer;
        }};
    }})()""")


def test_a_list_that_is_asked_for_twice_at_a_time_is_whole(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    counted = "document.querySelector('.columns nav p')?.textContent"
    with opened(browser, "#curves", LINE, folder):
        hold_the_first(browser, "entries/")
        browser.press("s")
        browser.wait_for("self.held")
        browser.wait_for(f"{counted} === '6 of 6 groups'")  # a poll has asked beside the key press
        browser.evaluate("held()")
        write_samples(folder, 5, [group(image_in(folder), 0, "more")])
        browser.wait_for(f"{counted} === '7 of 7 groups'")


def test_an_older_answer_is_not_drawn_over_a_newer_one(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    points = f"{LINE}.getAttribute('points').split(' ').length"
    with opened(browser, "#curves", LINE, folder), MetricsLog([JsonlSink(folder, resume_step=5)]) as metrics:
        hold_the_first(browser, "curve/0/0")
        metrics.write(6, {"reward": 0.9})
        browser.wait_for("self.held")
        metrics.write(7, {"reward": 0.9})
        browser.evaluate("fetch('data/runs').then((answer) => answer.json()).then(() => null)")
        browser.press("s")
        browser.wait_for(GROUP)
        browser.press("c")
        browser.wait_for(f"{LINE} && {points} === 7")
        browser.evaluate(f"""(() => {{
            self.drawn = [];
            const note = new MutationObserver(() => drawn.push({points}));
            note.observe(document.querySelector('.plot'), {{ childList: true }});
        }})()""")
        browser.evaluate("held()")
        metrics.write(8, {"reward": 0.9})  # its poll comes after that of the held answer
        browser.wait_for(f"{points} === 8")
        assert set(browser.evaluate("drawn")) <= {7, 8}


def test_an_open_section_stays_open_and_one_that_is_opened_again_is_new(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    section = "[...document.querySelectorAll('.metrics')].at(-1)"
    points = "querySelector('polyline')?.getAttribute('points').split(' ').length"
    with opened(browser, "#curves", LINE, folder), MetricsLog([JsonlSink(folder, resume_step=5)]) as metrics:
        browser.evaluate(f"{section}.querySelector('summary').click()")
        browser.wait_for(f"{section}.{points} === 5")
        metrics.write(6, {"reward": 0.9, "entropy": 0.1})
        browser.wait_for(f"{section}.textContent.includes('entropy') && {section}.{points} === 6")
        assert browser.evaluate(f"{section}.open")
        browser.evaluate(f"{section}.querySelector('summary').click()")
        metrics.write(7, {"reward": 0.9, "entropy": 0.1})
        browser.wait_for(f"document.querySelector('.metrics').{points} === 7")
        browser.evaluate(f"{section}.querySelector('summary').click()")
        browser.wait_for(f"{section}.{points} === 7")


def test_what_the_mouse_pointed_at_is_forgotten_when_it_leaves(browser: Browser, tmp_path: Path) -> None:
    with served(write_run(tmp_path / "run")) as address:
        open_page(browser, f"{address}#curves", LINE)
        browser.point_at(".plot")
        browser.wait_for("document.querySelector('#pointed').textContent.startsWith('step ')")
        browser.press("ArrowDown")  # scrolls, and does not leave the page
        browser.press("s")
        browser.wait_for(GROUP)
        browser.point_at(".answer")
        browser.wait_for("document.querySelector('.mark.faded')")
        browser.point_at("#head h1")
        browser.wait_for("!document.querySelector('.mark.faded')")
        browser.press("c")
        browser.wait_for(LINE)
        assert text_of(browser, "#pointed") == ""
        assert browser.evaluate("document.querySelectorAll('.plot .pointed').length") == 0


def test_boxes_and_points_lie_where_they_belong(browser: Browser, tmp_path: Path) -> None:
    with served(write_run(tmp_path / "run")) as address:
        open_page(browser, f"{address}#samples?step=4&group=0", "document.querySelector('.images .mark.box')")
        browser.wait_for("document.querySelector('.images img').naturalWidth")
        numbers = "((each) => (({ x, y, width, height }) => [x, y, width, height])(each.getBoundingClientRect()))"
        both = "['.images img', '.images .mark.box'].map((each) => document.querySelector(each))"
        image, box = browser.evaluate(f"{both}.map({numbers})")
        corner = [(box[axis] - image[axis]) / image[axis + 2] for axis in (0, 1)]
        size = [box[axis] / image[axis] for axis in (2, 3)]
        assert [*corner, *size] == pytest.approx([0.1, 0.2, 0.4, 0.4], abs=0.01)
        assert browser.evaluate("document.querySelectorAll('.images .mark.point').length") == 1


def test_filters_leave_what_they_name(browser: Browser, tmp_path: Path) -> None:
    with served(write_run(tmp_path / "run")) as address:
        open_page(browser, f"{address}#samples?kind=count&to=2", GROUP)
        assert text_of(browser, ".columns nav p") == "2 of 6 groups"
        choose(browser, "#kind", "colour")
        browser.wait_for("document.querySelector('.place').textContent.includes('step 2 · colour')")
        open_page(browser, f"{address}#samples?low=0.9", "document.querySelector('.group.text-only')")
        assert "No group passes the filter." in text_of(browser, ".group")


def test_a_long_list_has_elements_for_the_rows_in_view(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", recorded=tuple(range(1, 151)))
    first = "document.querySelector('.list li:first-child')"
    with opened(browser, "#samples", GROUP, folder):
        assert text_of(browser, ".columns nav p") == "300 of 300 groups"
        assert text_of(browser, ".columns nav p + p") == "… has truncated answers"
        assert text_of(browser, ".list .heads") == "steptypemean reward"
        assert browser.evaluate("document.querySelectorAll('.list li').length") < 60
        box = "document.querySelector('.list a[aria-current]').getBoundingClientRect()"
        frame = "document.querySelector('.list').getBoundingClientRect()"
        assert browser.evaluate(f"{box}.top >= {frame}.top && {box}.bottom <= {frame}.bottom"), "the newest is in view"
        browser.evaluate("document.querySelector('.list').scrollTop = 0")
        browser.wait_for(f"{first}.ariaPosInSet === '1'")
        assert browser.evaluate(f"{first}.ariaSetSize") == "300"
        browser.evaluate(f"{first}.querySelector('a').click()")
        browser.wait_for("document.querySelector('.place').textContent.includes('step 1 · colour')")


def test_two_runs_stand_side_by_side_on_the_same_row(browser: Browser, tmp_path: Path) -> None:
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "other", recorded=(1, 5))
    with served(one, other) as address:
        both = "document.querySelectorAll('.group .question').length === 2"
        open_page(browser, f"{address}#samples?step=4&group=1", both)
        places = browser.evaluate("[...document.querySelectorAll('.group .place')].map((place) => place.textContent)")
        assert places == ["one · step 4 · count · train/1", "other · step 5 · count · train/1"]


def test_one_scale_of_colours_for_runs_side_by_side(browser: Browser, tmp_path: Path) -> None:
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "other")
    write_samples(other, 4, [group(image_in(other), 0, "\\boxed{3}", trainer_logprob=-0.75)])
    with served(one, other) as address:
        tokens = "[...document.querySelectorAll('.token.below')]"
        open_page(browser, f"{address}#samples?step=4&group=0&heat=mismatch", f"{tokens}.length === 2")
        heats = browser.evaluate(f"{tokens}.map((token) => token.style.getPropertyValue('--heat'))")
        assert heats == ["100%", "50%"], "mismatches of 1 and of 0.5"


def test_a_log_prob_that_is_not_finite_has_no_colour(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", recorded=())
    write_samples(folder, 1, [group(image_in(folder), 0, "three", trainer_logprob=-math.inf)])
    with opened(browser, "#samples?step=1&group=0&heat=mismatch", "document.querySelector('.token')", folder):
        heats = "[...document.querySelectorAll('.token')].map((token) => token.style.getPropertyValue('--heat'))"
        assert browser.evaluate(heats) == ["", ""]
        browser.evaluate("document.querySelector('.token:last-child').click()")
        readout = "document.querySelector('.readout').textContent"
        browser.wait_for(f"{readout}.includes('\\u2013 trainer · mismatch \\u2013 ·')")


def test_images_after_the_prompt_have_their_own_numbers_and_marks(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", recorded=())
    sample = group("0123456789abcdef", 0, "three")
    answer = sample.answers[0]
    shown = RecordedImage(name=write_image(folder, png_bytes(Image.new("RGB", (64, 48)))))
    closer = RecordedTurn(messages=(RecordedMessage(role="user", parts=(shown, "and", shown)),), text="three")
    marks = tuple(Mark(image=image, xy=(0.5, 0.5), label=f"on {image}") for image in (3, 2, 3))
    answer = replace(answer, turns=(*answer.turns[:1], closer), marks=marks)
    unmarked = replace(answer, turns=answer.turns[:1], marks=())
    write_samples(folder, 1, [replace(sample, answers=(answer, unmarked))])
    with served(folder) as address:
        shots = "document.querySelectorAll('.answer .shot')"
        open_page(browser, f"{address}#samples?step=1&group=0", f"{shots}.length === 2")
        marked = "shot.querySelector('img').alt, ...[...shot.querySelectorAll('.mark')].map((mark) => mark.title)"
        found = browser.evaluate(f"[...{shots}].map((shot) => [{marked}])")
        assert found == [["Image 2", "#1 on 2"], ["Image 3", "#1 on 3", "#1 on 3"]]
        coloured = "[...document.querySelectorAll('.number')].map((number) => number.className)"
        assert browser.evaluate(coloured) == ["number hue0", "number"], "a colour stands for marks"


def test_an_episode_reads_as_a_conversation(browser: Browser, tmp_path: Path) -> None:
    """Calls and results in turn, with roles, tools, failures, rewards of turns, the time of a reply, and the end."""
    folder = write_run(tmp_path / "run", recorded=())
    sample = group(image_in(folder), 0, "zoom")
    first, second = sample.answers
    write_samples(folder, 1, [replace(sample, answers=(replace(first, end="max_turns"), second))])
    lines = "[...document.querySelectorAll('.answer[data-answer=\"0\"] :is(.score, .from, .words, img)')]"
    shown = f"{lines}.map((line) => line.alt ?? [...line.childNodes].map((part) => part.textContent).join(' '))"
    with served(folder) as address:
        open_page(browser, f"{address}#samples?step=1&group=0", GROUP)
        score, *conversation = browser.evaluate(shown)
        assert score.endswith("ended at the limit of turns")
        assert conversation == [
            *("model · turn 1 reward +0.25", "\\crop{1}"),
            *("tool zoom failed after 1.5 s", "zoom"),
            *("tool zoom", "Closer:", "Image 2", "zoom"),
            *("model · turn 2 reward +0.75", "zoom"),
        ]
        kinds = browser.evaluate("[...document.querySelectorAll('.answer .message')].map((each) => each.className)")
        assert kinds == ["message result failed", "message result"]
        assert text_of(browser, ".answer[data-answer='1']").startswith("#2"), "one turn needs no line of its figures"
        assert "turn" not in text_of(browser, ".answer[data-answer='1']")


def test_the_page_shown_is_marked_and_a_poll_leaves_nothing_behind(browser: Browser, tmp_path: Path) -> None:
    current = "[...document.querySelectorAll('nav [aria-current=page]')].map((tab) => tab.textContent)"
    with served(write_run(tmp_path / "run")) as address:
        open_page(browser, f"{address}#curves", LINE)
        assert browser.evaluate(current) == ["curves"]
        browser.evaluate("""(() => {
            self.polls = self.held = 0;
            for (const [name, change] of [["addEventListener", 1], ["removeEventListener", -1]]) {
                const real = document[name].bind(document);
                document[name] = (event, ...more) => {
                    if (event === "visibilitychange") { self.held += change; self.polls += change > 0; }
                    return real(event, ...more);
                };
            }
        })()""")
        browser.press("s")
        browser.wait_for("self.polls === 3")
        assert browser.evaluate("self.held") <= 1
        assert browser.evaluate(current) == ["samples"]


def test_what_others_wrote_stays_text(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", text=HOSTILE)
    write_samples(folder, 5, [group(image_in(folder), place, HOSTILE) for place in (2, 3)])
    page = export([ViewedRun(folder)], tmp_path / "out.html")
    with served(folder) as address:
        for start in (address, page.as_uri()):
            for heat in ("none", "advantage"):
                open_page(browser, f"{start}#samples?step=5&group=1&heat={heat}", GROUP)
                assert text_of(browser, ".question") == f"{HOSTILE} 3?"
                assert HOSTILE in text_of(browser, ".answer")
                assert browser.evaluate("document.title") == "run · Fovea"
                made = "document.querySelectorAll('body script:not([id]), .group a, [onload], [onerror]').length"
                assert browser.evaluate(made) == (start != address), "the script of the page in one file"
                # nothing may push the page wider than the window
                assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
            open_page(browser, f"{start}#curves", "document.querySelector('.plot polyline')")
            assert browser.evaluate("document.title") == "run · Fovea"


def test_the_policy_alone_stops_a_script(browser: Browser, tmp_path: Path) -> None:
    page = export([ViewedRun(write_run(tmp_path / "run"))], tmp_path / "out.html")
    inject = "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title=1\">'); 1"
    with served(tmp_path / "run") as address:
        for start in (address, page.as_uri()):
            open_page(browser, f"{start}#curves", "document.querySelector('.plot polyline')")
            browser.evaluate(inject)
            browser.wait_for("document.querySelector('img[src=x]').complete")
            assert browser.evaluate("document.title") == "run · Fovea"
            assert any("Content Security Policy" in problem for problem in browser.problems)


def test_the_exported_page_of_a_run_that_goes_on_does_not_call_it_finished(browser: Browser, tmp_path: Path) -> None:
    page = export([ViewedRun(write_run(tmp_path / "run"))], tmp_path / "out.html")
    open_page(browser, f"{page.as_uri()}#curves", LINE)
    assert text_of(browser, ".runs summary") == "run step 5 of 10"


def test_only_a_live_page_can_follow_the_newest_step(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    page = export([ViewedRun(run)], tmp_path / "out.html")
    with served(run) as address:
        for place, offered in ((address, True), (page.as_uri(), False)):
            open_page(browser, f"{place}#samples?step=4&group=0", GROUP)
            assert ("follow the newest" in text_of(browser, ".samples")) == offered
            assert text_of(browser, ".toolbar").endswith("follow the newest" if offered else "rows of run"), "no more"


@pytest.mark.parametrize("dark", [False, True])
def test_a_narrow_screen_and_the_dark(browser: Browser, tmp_path: Path, dark: bool) -> None:
    with served(write_run(tmp_path / "run")) as address:
        open_page(browser, f"{address}#samples?step=4&group=0", GROUP, width=390, height=800, dark=dark)
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
        background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (max(map(int, background.strip("rgb()").split(","))) < 64) == dark


def test_a_run_that_was_trained_and_exported(browser: Browser, tmp_path: Path) -> None:
    """From the tiny model's tokens to the page, by way of file://."""
    config = load_config([ROOT / "recipes" / "shapes_zoom.yaml"], [f"run_dir={tmp_path / 'run'}", *TRAINING])
    train(build(config))
    page = export([ViewedRun(tmp_path / "run")], tmp_path / "out.html")
    open_page(browser, f"{page.as_uri()}#curves", "document.querySelectorAll('.plot polyline').length > 5")
    assert "step 2 of 2, finished" in text_of(browser, ".runs")
    open_page(browser, f"{page.as_uri()}#samples?step=2&group=0&heat=mismatch", "document.querySelector('.token')")
    browser.wait_for("document.querySelector('.images img').naturalWidth")
    assert browser.evaluate("document.querySelectorAll('.answer').length") == 4
    gaps = browser.evaluate("[...document.querySelectorAll('.token')].map((token) => token.dataset.place).length")
    assert gaps >= 4
    assert browser.problems == []
