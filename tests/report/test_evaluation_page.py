"""The page of `fovea eval`: what it shows, and that nothing written by others becomes a tag."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fovea.evaluation.comparison import EvalResults, TargetAnswers, target_metrics
from fovea.evaluation.records import AnsweredRow, RecordedMessage, RecordedTurn, TaskRow
from fovea.report.evaluation import of_every_outcome, write_evaluation
from fovea.report.images import name_of, png_bytes
from tests.chromium import open_browser
from tests.records import said
from tests.report.pages import ATTACK, ATTACKS, Page

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


def test_nothing_written_by_others_becomes_a_tag(tmp_path: Path) -> None:
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
