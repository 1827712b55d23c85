"""The page in one file: report.html, what `fovea view --export` writes, and the page of `fovea eval`."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fovea.config.loading import dump_config, load_config
from fovea.evaluation.comparison import EvalResults, TargetAnswers, target_metrics
from fovea.evaluation.records import AnsweredRow, RecordedMessage, RecordedTurn, TaskRow
from fovea.report import export as export_module
from fovea.report.about import write_versions
from fovea.report.curves import MAX_POINTS
from fovea.report.evaluation import of_every_outcome, write_evaluation
from fovea.report.export import MAX_ANSWERS, MAX_EVALUATIONS, MAX_GROUPS, MAX_STEPS, export, write_report
from fovea.report.images import name_of, png_bytes
from fovea.report.page_files import SCRIPT, STYLE, page_file
from fovea.report.samples import write_samples
from fovea.report.viewed_run import ViewedRun
from tests.chromium import open_browser
from tests.records import said
from tests.report.folders import finish_run, group, image_in, write_answers_of, write_run
from tests.report.pages import ATTACK, ATTACKS, Page

RECIPE = Path(__file__).parents[2] / "recipes" / "geo3k.yaml"


def test_the_report_of_a_long_run_needs_little_memory(tmp_path: Path) -> None:
    """The lines of its metrics, 160 MB here, are in memory a few at a time."""
    folder = write_run(tmp_path / "run", steps=0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 4001):
            file.write(json.dumps({"step": step, "reward": 0.5, "x" * 40_000: 1.0}) + "\n")
    code = (
        "import sys; from pathlib import Path; from fovea.report.export import write_report; "
        "from fovea.metrics.log import peak_rss_gib; before = peak_rss_gib(); write_report(Path(sys.argv[1])); "
        "print(peak_rss_gib() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], check=True, capture_output=True, text=True)
    assert float(done.stdout) < 0.1
    assert Page(folder / "report.html").value("runs")[0]["step"] == 4000


def test_every_answer_of_the_server_is_in_the_file(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", text="</script>\u2028<b>\ud800")
    write_answers_of(folder, "test-final", ["</script>"])
    finish_run(folder, right=1, wrong=1)
    run = ViewedRun(folder)
    page = Page(export([run, run], tmp_path / "out.html"))
    for path, expected in {
        "curve/1/0": run.curve(0),
        "totals/0/1": run.totals(1),
        "summary/1/0": run.summary(),
        "about/0/0": run.settings_and_console(),
        "answers/0/0": run.answers(0),
        "entries/0/0": json.loads(run.entries(0)),
        "step/1/4": run.step(4),
    }.items():
        assert page.value(path) == json.loads(json.dumps(expected))
    first, _ = page.value("runs")
    assert (first["name"], first["folder"]) == ("run", "run"), "where the runs lay is nobody's business"
    png = (folder / "samples" / "images" / f"{image_in(folder)}.png").read_bytes()
    assert base64.b64decode(page.blocks[f"images/1/{image_in(folder)}"]) == png


def test_a_run_that_failed_early_has_a_page_and_a_long_run_few_points(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path))
    (run,) = page.value("runs")
    assert (run["name"], run["metrics"], run["about"], run["entries"]) == (tmp_path.name, [], {}, 0)
    folder = write_run(tmp_path / "run", steps=0, recorded=())
    lines = (f'{{"step": {step}, "reward": {step % 7}, "entropy": 0.125}}\n' for step in range(1, 50_001))
    (folder / "metrics.jsonl").write_text("".join(lines))
    page = Page(write_report(folder))
    curve = page.value("curve/0/0")
    assert len(curve["step"]) == len(curve["low"]) == MAX_POINTS
    assert (page.value("runs")[0]["step"], min(curve["low"]), max(curve["high"])) == (50_000, 0, 6)
    assert len(page.source) < 200_000


def test_a_bounded_number_of_steps_groups_and_answers(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", recorded=tuple(range(1, 101)))
    many = group(image_in(folder), 0, "x")
    write_samples(folder, 100, [replace(many, answers=many.answers * MAX_ANSWERS)] * (MAX_GROUPS + 1))
    page = Page(write_report(folder))
    (run,) = page.value("runs")
    steps = [step for step, _ in page.value("entries/0/0")]
    assert (len(steps), steps[0], steps[-1], run["entries"], run["newest_entry"]) == (MAX_STEPS, 1, 100, 40, 100)
    assert sorted(steps) == steps
    assert {f"data/step/0/{step}" for step in steps} == {name for name in page.blocks if name.startswith("data/step/")}
    assert [len(each["answers"]) for each in page.value("step/0/100")["groups"]] == [MAX_ANSWERS] * MAX_GROUPS
    assert len(page.value("entries/0/0")[-1][1]) == MAX_GROUPS
    assert run["left_out"].startswith("This file holds 40 of 100 recorded steps, and of each at most 8 groups")


def test_a_file_that_would_be_too_large_holds_fewer_steps_and_pictures(tmp_path: Path, monkeypatch: Any) -> None:
    folder = write_run(tmp_path / "run", recorded=tuple(range(1, 11)), text="x" * 20_000)
    write_answers_of(folder, "test-final", ["3"] * 100)
    write_answers_of(folder, "dev-step-000001", ["3"] * 100)
    whole = Page(write_report(folder))
    size = len(whole.blocks["data/step/0/10"])
    pictures = [name for name in whole.blocks if name.startswith("images/")]
    monkeypatch.setattr(export_module, "MAX_ANSWER_MIB", 1.5 * len(whole.blocks["data/answers/0/0"]) / 2**20)
    for room, steps, num_pictures in ((3.5 * size, [1, 9, 10], 1), (size + 10, [10], 0)):
        monkeypatch.setattr(export_module, "MAX_SAMPLE_MIB", room / 2**20)
        page = Page(write_report(folder))
        assert [step for step, _ in page.value("entries/0/0")] == steps, "the last, and others far from it"
        assert len([name for name in page.blocks if name in pictures]) == num_pictures
    assert page.value("runs")[0]["evaluations"] == ["test-final"]
    assert "data/answers/0/1" not in page.blocks


def test_a_run_with_many_dev_readings_has_the_newest(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for step in range(1, 20):
        write_answers_of(folder, f"dev-step-{step:06d}", ["3"])
    run = ViewedRun(folder)
    (shown,) = Page(write_report(folder)).value("runs")
    assert shown["evaluations"] == [f"dev-step-{step:06d}" for step in range(19, 19 - MAX_EVALUATIONS, -1)]
    # what is gone is left out
    (folder / "samples" / "step-000002.jsonl").unlink()
    (folder / "samples" / "images" / f"{image_in(folder)}.png").unlink()
    page = Page(export([run], tmp_path / "out.html"))
    assert [step for step, _ in page.value("entries/0/0")] == [1, 4]
    assert not [name for name in page.blocks if name.startswith("images/")]


def about(folder: Path, *overrides: str) -> dict[str, str]:
    """What the page of a run says of these settings of a recipe."""
    (folder / "config.yaml").write_text(dump_config(load_config([RECIPE], overrides)))
    return Page(write_report(folder)).value("runs")[0]["about"]


def test_the_head_says_what_was_trained_and_with_what(tmp_path: Path) -> None:
    write_versions(tmp_path, {"torch": "2.9.0", "fovea": ATTACK})
    shown = about(tmp_path, "environment.dev_files=null")
    assert shown.keys() >= {"train rows", "a step"}
    assert {name: text for name, text in shown.items() if name not in ("train rows", "a step")} == {
        "model": "Qwen/Qwen3-VL-2B-Instruct",
        "algorithm": "grpo (advantage grpo, loss clip)",
        "environment": "geo3k",
        "dev rows": "5 % of the training rows, held out by image",
        "test rows": "data/geo3k/test.parquet",
        "versions": f"torch 2.9.0, fovea {ATTACK}",
    }
    # rows that Python code has given
    files = ["environment.train_files=['{run_dir}/rows/rows-1.parquet']", "environment.test_files=null"]
    shown = about(tmp_path, *files, "environment.test_share=0.1")
    assert shown["train rows"] == "rows/rows-1.parquet in the run folder"
    assert shown["test rows"] == "10 % of the training rows, held out by image"


def hostile(folder: Path, text: str) -> Path:
    """The report of a run in which a text stands wherever a model, a data set or a user can write."""
    run = write_run(folder, text=text)
    (run / "config.yaml").write_text(f"note: {json.dumps(text)}\n", encoding="utf-8")
    write_answers_of(run, "test-final", [text], question=text)
    return write_report(run)


def test_nothing_written_by_others_becomes_a_tag(tmp_path: Path) -> None:
    attack, name = f"<!--<script>{ATTACK}", "<img src=x onerror=alert(1)>"
    plain, attacked = Page(hostile(tmp_path / "plain", "x")), Page(hostile(tmp_path / name, attack))
    assert attacked.tags == plain.tags
    assert not any(attack in attacked.source for attack in (*ATTACKS, name))
    assert attacked.value("step/0/4")["groups"][0]["truth"] == attack
    assert attacked.value("answers/0/0")["rows"][0]["question"] == attack
    assert attacked.value("runs")[0]["name"] == name


def test_the_page_is_self_contained(tmp_path: Path) -> None:
    page = Page(hostile(tmp_path / "run", "x"))
    assert "://" not in page.source.replace("http://www.w3.org/2000/svg", "")
    assert {tag for tag, _ in page.tags}.isdisjoint({"link", "iframe", "object", "base", "form", "img"})
    for _, attributes in page.tags:
        assert not {"src", "href", "srcset", "style"} & attributes.keys()
        assert not any(name.startswith("on") for name in attributes)


def test_the_policy_allows_its_own_style_and_script_only(tmp_path: Path) -> None:
    page = Page(hostile(tmp_path / "run", ATTACK))
    metas = page.attributes("meta")
    (policy,) = [meta["content"] for meta in metas if meta.get("http-equiv") == "Content-Security-Policy"]
    assert page.source.index(policy) < min(page.source.index("<style"), page.source.index("<script"))

    def digest(name: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(page_file(name).encode()).digest()).decode()}'"

    assert dict(part.strip().split(" ", 1) for part in policy.split(";")) == {
        "default-src": "'none'",
        "script-src": digest(SCRIPT),
        "style-src": digest(STYLE),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    kinds = [script.get("type") for script in page.attributes("script")]
    assert set(kinds) == {"application/json", "text/plain", None}
    assert kinds.count(None) == 1
    # the bundle has no import or export left
    assert not re.findall(r"^(?:import|export)\b.*", page_file(SCRIPT), re.MULTILINE)
    assert "</script" not in page_file(SCRIPT)


def look(page: Path) -> tuple[str, str]:
    """Title and text of a page in a real browser."""
    with open_browser() as browser:
        browser.open(page.resolve().as_uri() + "#samples")
        browser.wait_for("document.readyState === 'complete' && (!self.main || document.querySelector('.truth'))")
        return browser.evaluate("document.title"), browser.evaluate("document.body.innerText")


@pytest.mark.browser
def test_injected_scripts_do_not_run_in_a_browser(tmp_path: Path) -> None:
    control = tmp_path / "control.html"
    control.write_text(f"<!doctype html><title>clean</title><body>{ATTACKS[0]}")
    assert look(control)[0] == "owned", "the browser runs no scripts at all"
    title, text = look(hostile(tmp_path / "run", ATTACK))
    assert title == "run · Fovea"
    assert ATTACKS[0] in text


@pytest.mark.browser
def test_the_policy_alone_stops_a_script(tmp_path: Path) -> None:
    report = hostile(tmp_path / "run", "x")
    report.write_text(report.read_text().replace("<main", f"{ATTACKS[0]}{ATTACKS[1]}<main"))
    assert look(report)[0] == "run · Fovea"


RED = Image.new("RGB", (48, 48), (200, 30, 30))


def answers_of(target: str, rights: list[float], text: str = "said", is_model: bool = True) -> TargetAnswers:
    again = RecordedMessage(role="user", parts=(f"{text} again",))
    turns = (RecordedTurn(text="closer"), RecordedTurn(messages=(again,), text=text))
    greedy = {}
    for i, x in enumerate(rights):
        answer = said(text, reward=x, accuracy=x, parts={text: x}, turns=turns)
        greedy[f"test/{i}"] = AnsweredRow(id=f"test/{i}", index=i, kind="k", answers=(answer,))
    return TargetAnswers(name=target, greedy=greedy, samples=greedy, shuffled=greedy, blank=greedy, is_model=is_model)


def rows(n: int, text: str = "How many?") -> tuple[TaskRow, ...]:
    fields = {"question": text, "truth": text, "image_type": text}
    return tuple(TaskRow(id=f"test/{i}", index=i, kind=f"{text} {i % 2}", **fields) for i in range(n))


def write(folder: Path, text: str) -> Path:
    targets = (answers_of(f"{text} one", [1, 0, 1, 0], text), answers_of(f"{text} two", [1, 1, 0, 0], text))
    results = EvalResults(rows=rows(4, text), targets=targets)
    folder.mkdir()
    shown: dict[str, Any] = {"title": text, "images_of": lambda _: [RED], "settings": f"note: {json.dumps(text)}"}
    return write_evaluation(folder / "page.html", results, target_metrics(results), **shown)


def test_figures_answers_and_pictures(tmp_path: Path) -> None:
    page = Page(write(tmp_path / "page", "How many?"))
    tables = {table["title"]: table["rows"] for table in page.value("summary/1/0")["tables"]}
    accuracy = {row["name"]: row["texts"][0] for row in tables["Accuracy of greedy answers in %"]}
    assert accuracy == {
        "all": "50.0 [15, 85]",
        "How many? 0": "50.0 [9, 91]",
        "How many? 1": "50.0 [9, 91]",
        "images: How many?": "50.0 [15, 85]",
        "all, minus How many? one": "+0.0 [-75.0, +75.0]",
        "rows on which it is better": "1",
        "rows on which it is worse": "1",
    }
    assert tables["Mean reward and its parts"][1]["texts"] == ["0.5 [0.15, 0.85]"]
    assert [row["name"] for row in tables["Sampled answers, in %"]] == ["pass@1", "majority of 1"]
    (ablation,) = (of for title, of in tables.items() if title.startswith("Image ablation"))
    assert [row["name"] for row in ablation][-2:] == ["lost by shuffling", "lost by blanking"]
    row = next(row for row in page.value("answers/1/0")["rows"] if row["id"] == "test/1")
    ((answer,), ((picture,),)) = row["answers"], [message["parts"] for message in row["messages"]]
    assert (answer["accuracy"], picture["name"]) == (1.0, name_of(png_bytes(RED)))
    turns = [([message["parts"] for message in turn["messages"]], turn["text"]) for turn in answer["turns"]]
    assert turns == [([], "closer"), ([["How many? again"]], "How many?")]
    assert base64.b64decode(page.blocks[f"images/0/{picture['name']}"]) == png_bytes(RED)
    assert page.value("about/0/0")["settings"] == [["note", "How many?"]]
    assert [run["name"] for run in page.value("runs")] == ["How many? one", "How many? two"]


def test_nothing_written_by_others_becomes_a_tag_of_an_evaluation(tmp_path: Path) -> None:
    plain, attacked = Page(write(tmp_path / "plain", "x")), Page(write(tmp_path / "attacked", ATTACK))
    assert attacked.tags == plain.tags
    assert not any(attack in attacked.source for attack in ATTACKS)
    assert attacked.value("answers/0/0")["rows"][0]["truth"] == ATTACK
    assert "://" not in plain.source.replace("http://www.w3.org/2000/svg", "")


def test_rows_of_every_outcome_and_kind_come_first() -> None:
    """20 rows, one of a rare kind and one that is missed; a baseline that is always wrong has no say."""
    of_kinds = [replace(row, kind="rare" if row.index == 19 else "common") for row in rows(20)]
    rights = [0.0 if i == 7 else 1.0 for i in range(20)]
    targets = (answers_of("model", rights), answers_of("constant:x", [0.0] * 20, is_model=False))
    ordered = of_every_outcome(EvalResults(rows=tuple(of_kinds), targets=targets))
    assert len(ordered) == 20
    assert {row.index for row in ordered[:3]} == {0, 7, 19}


@pytest.mark.browser
def test_targets_stand_beside_each_other_in_a_browser(tmp_path: Path) -> None:
    file = write(tmp_path / "page", ATTACK)
    with open_browser() as browser:
        browser.open(file.as_uri())
        browser.wait_for("document.querySelector('.figures-table')")
        assert browser.evaluate("document.title") == f"{ATTACK} · Fovea"
        tabs = browser.evaluate("[...document.querySelectorAll('nav a:not([hidden])')].map((tab) => tab.textContent)")
        assert tabs == ["overview", "held-out", "settings"]
        cells = "[...document.querySelector('.figures-table tbody tr').cells].map((cell) => cell.textContent)"
        assert browser.evaluate(cells) == ["all", "50.0 [15, 85]", "50.0 [15, 85]", "4", ""]
        assert browser.evaluate("document.querySelectorAll('.figures-table svg .to').length") > 0
        browser.press("e")
        browser.wait_for("document.querySelectorAll('.held-out').length === 4")
        images = "[...document.images]"
        browser.wait_for(f"{images}.length === 4 && {images}.every((image) => image.naturalWidth)")
        assert browser.evaluate("document.querySelectorAll('.held-out .answer').length") == 8
        assert browser.evaluate("document.querySelectorAll('.held-out .answer.right').length") == 4
        browser.press("t")
        browser.wait_for("document.querySelector('.settings tbody tr')")
        assert browser.evaluate("document.querySelectorAll('.console').length") == 0
        assert browser.problems == []
