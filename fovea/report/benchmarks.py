"""Scores on published benchmarks, with the published figures beside them: a table and the page of `--html`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table
from rich.text import Text

from fovea.evaluation.benchmarks.base import Benchmark, Published
from fovea.evaluation.comparison import EvalResults, TargetMetrics
from fovea.evaluation.statistics import Estimate, percent_text
from fovea.report.evaluation import ImagesOf, add_answers, target_facts, write_targets
from fovea.report.export import PageData
from fovea.report.figures import RunSummary, Stat, target_summary
from fovea.utils.shown_text import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkResult:
    """The answers of all targets to one benchmark."""

    benchmark: Benchmark
    results: EvalResults
    metrics: Sequence[TargetMetrics]
    scores: Sequence[Mapping[str, Estimate]]
    """Scores by name, of each target."""
    images_of: ImagesOf
    command: str
    """The command that gives these scores."""


def benchmark_table(found: Sequence[BenchmarkResult]) -> Table:
    """A line for each score of each target."""
    table = Table(title=Text("Benchmarks: scores in %, greedy, with 95 % intervals"), title_justify="left")
    for header in ("benchmark", "target", "rows", "score", "published"):
        table.add_column(header, overflow="fold", justify="left" if header in {"benchmark", "target"} else "right")
    for each in found:
        for target, scores in zip(each.results.targets, each.scores, strict=True):
            for name, score in scores.items():
                published = " ".join(str(figure.percent) for figure in _published(each, name))
                cells = (_label(each, name), target.name, str(score.n), percent_text(score), published)
                table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def below_table(found: Sequence[BenchmarkResult]) -> list[str]:
    """Whose the published figures are, and the commands that give the scores."""
    figures = [(each.benchmark.name, figure) for each in found for figure in each.benchmark.published]
    sources = dict.fromkeys(f"{name}: {_source(figure)}" for name, figure in figures)
    return [*sources, *(each.command for each in found)]


def write_benchmarks(path: Path, found: Sequence[BenchmarkResult], settings: str) -> Path:
    """Write the page to `path` and return that; each benchmark is an evaluation of every target."""
    data, names = PageData(), [each.benchmark.name for each in found]
    for number, each in enumerate(found):
        add_answers(data, number, each.benchmark.name, each.results, each.images_of)
    targets = found[0].results.targets
    facts = [target_facts(target, ", ".join(names), names) for target in targets]
    return write_targets(path, data, facts, [_summary(found, place) for place in range(len(targets))], settings)


def _summary(found: Sequence[BenchmarkResult], place: int) -> RunSummary:
    """The scores of one target as its main figures, and its tables on each benchmark."""
    headline = tuple(
        Stat(
            label=_label(each, name),
            value=percent_text(score),
            note="; ".join(f"{figure.percent} {_source(figure)}" for figure in _published(each, name)),
        )
        for each in found
        for name, score in each.scores[place].items()
    )
    tables = tuple(
        replace(table, title=f"{each.benchmark.name}: {table.title}")
        for each in found
        for table in target_summary(each.metrics[place], each.results.targets[0].name).tables
    )
    return RunSummary(headline=headline, notes=tuple(each.command for each in found), tables=tables)


def _label(result: BenchmarkResult, score: str) -> str:
    return result.benchmark.name if len(result.scores[0]) == 1 else f"{result.benchmark.name} {score}"


def _published(result: BenchmarkResult, score: str) -> list[Published]:
    return [each for each in result.benchmark.published if each.score == score]


def _source(figure: Published) -> str:
    return f"published of {figure.model}, {figure.source}"
