"""Run folders as a run leaves them, written by the run's own writers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from fovea.config.loading import dump_config
from fovea.config.model import Model, TinyModel
from fovea.config.run import Config
from fovea.evaluation.json_file import write_answers
from fovea.evaluation.records import AnsweredRow, RecordedImage, RecordedMessage, RecordedTurn, TokenTrace
from fovea.metrics.log import JsonlSink, MetricsLog
from fovea.report.images import png_bytes, write_image
from fovea.report.samples import write_samples
from fovea.report.summary import Summary, write_summary
from fovea.types import Evaluation
from fovea_gym.types import Mark
from tests.records import said

KINDS = ("colour", "count")


def write_run(folder: Path, *, steps: int = 5, recorded: tuple[int, ...] = (1, 2, 4), text: str = "\\boxed{3}") -> Path:
    """A run folder of some steps; `text` stands wherever a model, a data set or a user's code can write."""
    folder.mkdir(parents=True)
    config = Config(max_steps=10, model=Model(tiny=TinyModel()))
    (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    with MetricsLog([JsonlSink(folder)]) as log:
        for step in range(1, steps + 1):
            part = math.nan if step == 1 else 0.5
            log.write(step, {"reward": step / 10, "seconds/step": 1.0, f"reward/{text}": part})
    name = write_image(folder, png_bytes(Image.new("RGB", (64, 48), (200, 30, 30))))
    for step in recorded:
        write_samples(folder, step, [group(name, place, text) for place in range(2)])
    return folder


def image_in(folder: Path) -> str:
    """The name of the picture that `write_run` has stored."""
    return next((folder / "samples" / "images").iterdir()).stem


def group(image: str, place: int, text: str, trainer_logprob: float = -1.25) -> AnsweredRow:
    """A group of a right answer in two turns, and a truncated one; the log-prob is that of the last token."""
    shown = RecordedImage(name=image, frame=(1000, 1000))
    asked = RecordedMessage(role="user", parts=(shown, f"{text} {place}?"))
    closer = RecordedMessage(role="tool", tool=text, parts=("Closer:", shown, text))
    failure = RecordedMessage(role="tool", tool=text, failed=True, parts=(text,))
    tokens = TokenTrace(
        **{"pieces": (text, "<|im_end|>"), "engine_logprobs": (-0.5, -0.25)},
        **{"trainer_logprobs": (-0.5, trainer_logprob), "advantages": (0.7, 0.7)},
    )
    turns = (
        RecordedTurn(text="\\crop{1}", reward=0.25),
        RecordedTurn(messages=(failure, closer), text=text, tokens=tokens, reward=0.75, seconds=1.5),
    )
    mark = Mark(image=1, xy=(0.25, 0.5), label=text)
    scored: dict[str, Any] = {"reward": 1.0, "accuracy": 1.0, "parts": {text: 1.0}, "image_parts": ({"seen": 1.0},)}
    return AnsweredRow(
        **{"id": f"train/{place}", "question": f"{text} {place}?", "truth": text, "messages": (asked,)},
        kind=text if place > 1 else KINDS[place],
        answers=(said(text, **scored, turns=turns, marks=(mark,)), said("(100,200),(500,600)", finish="length")),
    )


def write_answers_of(folder: Path, name: str, texts: Sequence[str], question: str = "How many?") -> None:
    """Answers of an evaluation to rows whose truth is 3."""
    rows = [
        AnsweredRow(
            **{"id": f"test/{place}", "index": place, "kind": KINDS[place % 2], "question": question, "truth": "3"},
            answers=(said(text, reward=float(text == "3"), accuracy=float(text == "3")),),
        )
        for place, text in enumerate(texts)
    ]
    write_answers(folder, name, rows)


def evaluation_of(**right_of: tuple[int, int]) -> Evaluation:
    """An evaluation with so many right answers of so many, by kind."""
    kinds = {kind: (1.0,) * right + (0.0,) * (n - right) for kind, (right, n) in right_of.items()}
    return Evaluation(accuracies=kinds)


def summary_of(final: Evaluation, **fields: Any) -> Summary:
    given = {"before": None, "warmup": None, "shuffled_images": None, "blank_images": None, "steps": 5, "seed": 0}
    seconds = {"warmup_seconds": 0.0, "rl_seconds": 1.0, "total_seconds": 1.0}
    return Summary(**{"final": final, "duplicates_across_splits": None, **given, **seconds, **fields})


def finish_run(folder: Path, right: int, wrong: int, unscored: int = 0) -> None:
    """End a run with a summary of so many right, wrong and unscored answers to test rows."""
    values = (1.0,) * right + (0.0,) * wrong
    parts = {"answer": values, "form": (1.0,) * len(values)}
    final = Evaluation(accuracies={"count": values}, rewards=values, parts=parts, num_unscored=unscored)
    before = Evaluation(accuracies={"count": (0.0,) * len(values)}, rewards=(0.0,) * len(values))
    write_summary(folder / "summary.json", summary_of(final, before=before, shuffled_images=before))
