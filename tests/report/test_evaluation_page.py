"""The page of `fovea eval`: what it shows, and that nothing written by others becomes a tag."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path

from PIL import Image

from fovea.evaluation.answer import SampledAnswer
from fovea.evaluation.comparison import EvalResults, EvalRow, TargetAnswers, target_metrics
from fovea.evaluation.evaluator import AnsweredRow
from fovea.report.evaluation import MAX_SHOWN, outcomes, write_evaluation
from fovea.report.images import png_bytes
from tests.report.pages import ATTACK, ATTACKS, Page

RED = Image.new("RGB", (48, 48), (200, 30, 30))


def answers_of(target: str, rights: list[float], text: str = "said", is_model: bool = True) -> TargetAnswers:
    turns = (("assistant", "closer"), ("user", f"{text} again"), ("assistant", text))
    greedy = {
        f"test/{i}": AnsweredRow(
            id=f"test/{i}",
            index=i,
            kind="k",
            answers=(SampledAnswer(text=text, reward=x, accuracy=x, parts={text: x}, turns=turns),),
        )
        for i, x in enumerate(rights)
    }
    return TargetAnswers(name=target, greedy=greedy, samples=greedy, shuffled=greedy, blank=greedy, is_model=is_model)


def rows(n: int, text: str = "How many?") -> tuple[EvalRow, ...]:
    return tuple(
        EvalRow(id=f"test/{i}", index=i, kind=f"{text} {i % 2}", question=text, truth=text, image_type=text)
        for i in range(n)
    )


def write(folder: Path, text: str) -> Page:
    targets = (answers_of(f"{text} one", [1, 0, 1, 0], text), answers_of(f"{text} two", [1, 1, 0, 0], text))
    results = EvalResults(rows=rows(4, text), targets=targets)
    folder.mkdir()
    page = write_evaluation(
        folder / "page.html",
        results,
        target_metrics(results),
        title=text,
        images_of=lambda _: [RED],
        settings=f"note: {text}",
    )
    return Page(page)


def test_figures_and_pictures(tmp_path: Path) -> None:
    page = write(tmp_path / "page", "How many?")
    assert "How many? two 50.0 [15, 85] 4 0 +0.0 [-75.0, +75.0] 1 1" in page.text
    assert "lost by shuffling" in page.text
    assert "closer user How many? again How many?" in page.text
    assert "pass@1" in page.text
    assert "Misses of all models 1 of 4 rows; 1 shown" in page.text
    assert "Rows on which the models differ 2 of 4 rows; 2 shown" in page.text
    pictures = [image["src"] for image in page.attributes("img")]
    assert [base64.b64decode((source or "").partition(",")[2]) for source in pictures] == [png_bytes(RED)] * 4
    assert len([item for item in page.attributes("li") if item.get("class") == "answer right"]) == 4


def test_nothing_written_by_others_becomes_a_tag(tmp_path: Path) -> None:
    plain, attacked = write(tmp_path / "plain", "x"), write(tmp_path / "attacked", ATTACK)
    assert [tag for tag, _ in attacked.tags] == [tag for tag, _ in plain.tags]
    assert [sorted(found) for _, found in attacked.tags] == [sorted(found) for _, found in plain.tags]
    assert not any(attack in attacked.source for attack in ATTACKS)
    assert "{{ 7 * 7 }}" in attacked.text
    assert "://" not in plain.source


def test_rows_of_every_kind_are_shown_and_not_too_many() -> None:
    """20 hits, of two kinds in turn; a baseline that is always wrong has no say."""
    of_kinds = [replace(row, kind="rare" if row.index == 19 else "common") for row in rows(20)]
    targets = (answers_of("model", [1.0] * 20), answers_of("constant:x", [0.0] * 20, is_model=False))
    (hits,) = outcomes(EvalResults(rows=tuple(of_kinds), targets=targets), lambda _: [])
    assert (hits.title, hits.count, len(hits.shown)) == ("Hits", 20, MAX_SHOWN)
    assert [shown.row.kind for shown in hits.shown].count("rare") == 1
    assert [target for target, _ in hits.shown[0].answers] == ["model", "constant:x"]
