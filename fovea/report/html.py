"""report.html: a self-contained page about one run, rendered from its run folder.

Prompts, answers and gold answers are untrusted text, from a model or a data set: Jinja escapes all of it, and a
Content-Security-Policy forbids scripts and outside requests as a second line of defence.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import count
from pathlib import Path
from statistics import fmean

from jinja2 import Environment, PackageLoader, StrictUndefined

from fovea.evaluation.statistics import Estimate, format_interval, percent
from fovea.evaluation.tables import percent_text
from fovea.metrics.log import BESIDE_STEPS, read_metrics
from fovea.report.about import CONFIG_FILE, SUMMARY_FILE, about, read_config, read_hints
from fovea.report.figure_rows import figure_rows
from fovea.report.images import read_image
from fovea.report.records import RecordedAnswer, RecordedImage, RecordedMessage, RecordedTurn, SampleRecord
from fovea.report.samples import read_samples, sample_steps
from fovea.report.summary import (
    Stage,
    SummaryJson,
    accuracy_at,
    by_type_at,
    not_scored,
    read_summary,
)
from fovea.types import Metrics
from fovea.utils.files import write_atomically

MAX_TURN_IMAGES = 4
"""Images that the environment added, embedded of one answer; a bound on the size of the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPart:
    """A part of a message: its text, an image (PNG file), or a note in place of an image that is not embedded."""

    text: str = ""
    image: bytes | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownMessage:
    """A message of the environment between two answers of the model."""

    role: str
    parts: tuple[ShownPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTurn:
    """The text of the model, and the messages before it (none in the first turn, whose prompt is shown above)."""

    messages: tuple[ShownMessage, ...] = ()
    text: str


def shown_turns(run_dir: Path, record: SampleRecord, answer: RecordedAnswer) -> tuple[ShownTurn, ...]:
    """The turns of an answer, one where a record of an older version kept the last text only."""
    places = count(1)
    prompt = {image.name: place for place, image in enumerate(record.images, start=1)}
    turns = answer.turns or (RecordedTurn(text=answer.score.text),)
    return tuple(
        ShownTurn(
            messages=tuple(_message(run_dir, message, prompt, places) for message in turn.messages), text=turn.text
        )
        for turn in turns
    )


def _message(run_dir: Path, message: RecordedMessage, prompt: dict[str, int], places: Iterator[int]) -> ShownMessage:
    parts = (
        ShownPart(text=part) if isinstance(part, str) else _image(run_dir, part, prompt, places)
        for part in message.parts
    )
    return ShownMessage(role=message.role, parts=tuple(parts))


def _image(run_dir: Path, image: RecordedImage, prompt: dict[str, int], places: Iterator[int]) -> ShownPart:
    """An image of a message; those of the prompt stand beside the answers already."""
    if image.name in prompt:
        return ShownPart(note=f"image {prompt[image.name]} of the prompt")
    if next(places) > MAX_TURN_IMAGES:
        return ShownPart(note="another image, which `fovea view` shows")
    png = read_image(run_dir, image.name)
    return ShownPart(image=png) if png else ShownPart(note="an image whose file in samples/images is gone")


REPORT_FILE = "report.html"
MAX_SAMPLE_STEPS = 40
"""Steps whose samples are in the page; a bound, because images are embedded."""
MAX_RECORDS, MAX_ANSWERS = 4, 8
"""Records shown of a step, and answers of each; `fovea view` shows all."""
SMALL_IMAGE_PX = 128
"""Smaller images are enlarged without blur."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """A labelled number, formatted for display."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindAccuracy:
    """Accuracies of one question type, as fractions in 0..1."""

    name: str
    warmup: Estimate | None
    final: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTotal:
    """The time of one phase, summed over all steps."""

    name: str
    seconds: float
    mean_ms: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRecord:
    """A sample record with its images (PNG files); None where an image file has been deleted from the run folder."""

    record: SampleRecord
    images: tuple[bytes | None, ...]
    turns: tuple[tuple[ShownTurn, ...], ...]
    """The turns of each answer that is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleStep:
    """The sample records of one step."""

    step: int
    records: tuple[ShownRecord, ...]


def write_report(run_dir: Path) -> Path:
    """Write reward_curve.png and report.html of a run, finished or not; returns the path of report.html."""
    from fovea.report.panels import (  # noqa: PLC0415  matplotlib takes a second to import,
        CURVE_FILE,
        draw_curve,
        draw_panels,
    )

    metrics = read_metrics(run_dir)
    if metrics:
        draw_curve(metrics, run_dir / CURVE_FILE)
    drawn = {"curve": (run_dir / CURVE_FILE).read_bytes() if metrics else None, "panels": draw_panels(metrics)}
    page = page_environment().get_template("report.html.j2").render(_content(run_dir, metrics) | drawn)
    path = run_dir / REPORT_FILE
    # text of a data set may hold lone surrogates, which UTF-8 cannot encode
    write_atomically(path, page.encode("utf-8", errors="replace"))
    return path


def page_environment() -> Environment:
    """The Jinja environment of Fovea's pages: autoescaping, undefined names are errors, shared filters."""
    environment = Environment(
        loader=PackageLoader("fovea", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["css"] = files("fovea.report").joinpath("style.css").read_text(encoding="utf-8")
    environment.filters |= {
        "png_uri": _png_uri,
        "is_small": _is_small,
        "number": _number,
        "percent": percent,
        "interval": percent_text,
        "csp_hash": _csp_hash,
    }
    return environment


def _content(run_dir: Path, metrics: Sequence[Metrics]) -> dict[str, object]:
    # every file may be missing: the report is also written of an unfinished or crashed run
    summary_path, config_path = run_dir / SUMMARY_FILE, run_dir / CONFIG_FILE
    summary = read_summary(summary_path) if summary_path.exists() else None
    config = read_config(run_dir) if config_path.exists() else None
    return {
        "name": run_dir.resolve().name,
        "about": about(run_dir, config),
        "hints": read_hints(run_dir),
        "figures": figure_rows(summary) if summary else [],
        "num_sample_steps": len(sample_steps(run_dir)),
        "summary": summary,
        "headline": _headline(summary, metrics),
        "types": _kind_accuracies(summary) if summary else [],
        "not_scored": not_scored(summary) if summary else "",
        "last_step": int(metrics[-1]["step"]) if metrics else 0,
        "phases": _phase_totals(metrics),
        "machine": _machine_stats(metrics),
        "samples": _sample_steps(run_dir),
        "config": config,
    }


def _headline(summary: SummaryJson | None, metrics: Sequence[Metrics]) -> list[Stat]:
    if summary is None:
        return _reward_stats(metrics)
    before = "before warm-up" if summary["accuracy"]["warmup"] is not None else "before RL"
    stages: dict[str, Stage] = {before: "before", "after warm-up": "warmup", "after RL": "final"}
    return [
        Stat(
            label=label,
            value=f"{percent(value.mean)} %",
            note=f"95 % interval {format_interval((value.low, value.high))}",
        )
        for label, stage in stages.items()
        if (value := accuracy_at(summary, stage))
    ]


def _reward_stats(metrics: Sequence[Metrics]) -> list[Stat]:
    rewards = _values(metrics, "reward")
    if not rewards:
        return []
    tenth = math.ceil(len(rewards) / 10)
    note = f"mean of {tenth} step{'s' if tenth > 1 else ''}"
    return [
        Stat(label="reward at the start", value=f"{fmean(rewards[:tenth]):.3f}", note=note),
        Stat(label="reward now", value=f"{fmean(rewards[-tenth:]):.3f}", note=note),
    ]


def _kind_accuracies(summary: SummaryJson) -> list[KindAccuracy]:
    warmup, final = by_type_at(summary, "warmup"), by_type_at(summary, "final")
    of_all = accuracy_at(summary, "final")
    if of_all and list(final) != ["all"]:
        final["all"] = of_all
        warmup |= {"all": before} if (before := accuracy_at(summary, "warmup")) else {}
    return [KindAccuracy(name=name, warmup=warmup.get(name), final=value) for name, value in final.items()]


def _phase_totals(metrics: Sequence[Metrics]) -> list[PhaseTotal]:
    """Totals of the phases, longest first; the part of `seconds/step` outside all phases is "other"."""
    totals: Metrics = {}
    for row in metrics:
        for key, value in row.items():
            if key.startswith("seconds/") and math.isfinite(value):
                totals[key.removeprefix("seconds/")] = totals.get(key.removeprefix("seconds/"), 0.0) + value
    totals = {name: total for name, total in totals.items() if name not in BESIDE_STEPS}
    step = totals.pop("step", 0.0)
    named = sum(totals.values())
    if step > named:
        totals["other"] = step - named
    whole = max(step, named)
    return [
        PhaseTotal(name=name, seconds=s, mean_ms=1000 * s / len(metrics), share=s / whole if whole else 0.0)
        for name, s in sorted(totals.items(), key=lambda pair: -pair[1])
    ]


def _machine_stats(metrics: Sequence[Metrics]) -> list[Stat]:
    """Peak memory, and throughput and answer length as means over the last tenth of the steps."""
    stats = []
    for key, label in {
        "memory/peak_rss_gib": "peak memory",
        "memory/step_gib": "memory of a step, on the GPU where there is one",
        "memory/learners_peak_gib": "peak memory of a learner's process, on its GPU where it has one",
    }.items():
        if values := _values(metrics, key):
            stats.append(Stat(label=label, value=f"{max(values):.2f} GiB"))
    late = metrics[-math.ceil(len(metrics) / 10) :] if metrics else []
    for key, label in {
        "tokens_per_second": "tokens/s",
        "response_tokens_mean": "tokens per answer",
    }.items():
        if values := _values(late, key):
            stats.append(Stat(label=label, value=_count(fmean(values)), note="in the last tenth of steps"))
    return stats


def _sample_steps(run_dir: Path) -> list[SampleStep]:
    """All recorded steps; evenly spaced ones where there are more than MAX_SAMPLE_STEPS."""
    steps = sample_steps(run_dir)
    places = {round(place * (len(steps) - 1) / (MAX_SAMPLE_STEPS - 1)) for place in range(MAX_SAMPLE_STEPS)}
    chosen = steps if len(steps) <= MAX_SAMPLE_STEPS else [steps[place] for place in sorted(places)]
    return [
        SampleStep(step=step, records=tuple(_shown(run_dir, record) for record in records[:MAX_RECORDS]))
        for step, records in read_samples(run_dir, chosen).items()
    ]


def _shown(run_dir: Path, record: SampleRecord) -> ShownRecord:
    return ShownRecord(
        record=record,
        images=tuple(read_image(run_dir, image.name) for image in record.images),
        turns=tuple(shown_turns(run_dir, record, answer) for answer in record.answers[:MAX_ANSWERS]),
    )


def _values(metrics: Sequence[Mapping[str, float]], key: str) -> list[float]:
    return [row[key] for row in metrics if math.isfinite(row.get(key, math.nan))]


def _png_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _is_small(png: bytes) -> bool:
    """True if the image is narrower than SMALL_IMAGE_PX."""
    # bytes 16 to 19 of a PNG file are the width in its IHDR chunk
    return int.from_bytes(png[16:20]) < SMALL_IMAGE_PX


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "not finite"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _csp_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
