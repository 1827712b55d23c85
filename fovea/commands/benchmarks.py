"""`fovea eval bench=...`: evaluates targets on published benchmarks, and shows their scores next to published ones."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fovea import __version__
from fovea.commands.evaluate import EvalOptions, EvalSet, Say, check_servers, compare, print_progress, say_of
from fovea.commands.targets import Target, parse_targets, settings_file, shared_settings
from fovea.config.loading import dump_config, load_config, public_settings
from fovea.config.recipes import Override
from fovea.config.run import Config
from fovea.evaluation.comparison import EvalResults, TargetMetrics, target_metrics
from fovea.evaluation.json_file import results_json, write_tree
from fovea.evaluation.statistics import percent_text
from fovea.report.evaluation import ImagesOf, add_answers, target_facts, write_targets
from fovea.report.export import PageData
from fovea.report.figures import RunSummary, Stat, target_summary
from fovea.run.fingerprint import GivenCode
from fovea.wiring.images import make_access
from fovea_gym.benchmarks.base import Benchmark, Published
from fovea_gym.benchmarks.environment import BenchmarkEnvironment, open_benchmark
from fovea_gym.benchmarks.estimates import Estimate
from fovea_gym.benchmarks.hallusionbench import HallusionBench
from fovea_gym.benchmarks.mathverse import MathVerse
from fovea_gym.benchmarks.mathvision import MathVision
from fovea_gym.benchmarks.mathvista import MathVista
from fovea_gym.benchmarks.mmmu import Mmmu
from fovea_gym.benchmarks.places import RefCoco, ScreenSpot
from fovea_gym.benchmarks.vstar import VStar
from fovea_gym.errors import ConfigError
from fovea_gym.settings.base import Tree
from fovea_gym.utils.event_loop import wait_for
from fovea_gym.utils.shown_text import printable, without_secrets


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkResult:
    """The answers of all targets to one benchmark."""

    benchmark: Benchmark
    results: EvalResults
    metrics: Sequence[TargetMetrics]
    scores: Sequence[Mapping[str, Estimate]]
    """Scores by name, for each target."""
    images_of: ImagesOf
    command: str
    """The command that reproduces these scores."""


def benchmark_table(found: Sequence[BenchmarkResult]) -> Table:
    """A table with a line for each score of each target."""
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


def write_benchmarks(path: Path, found: Sequence[BenchmarkResult], settings: str) -> Path:
    """Write the page to `path` and return the path; each benchmark is one evaluation of all targets."""
    data, names = PageData(), [each.benchmark.name for each in found]
    for number, each in enumerate(found):
        add_answers(data, number, each.benchmark.name, each.results, each.images_of)
    targets = found[0].results.targets
    facts = [target_facts(target, ", ".join(names), names) for target in targets]
    return write_targets(path, data, facts, [_summary(found, place) for place in range(len(targets))], settings)


def _summary(found: Sequence[BenchmarkResult], place: int) -> RunSummary:
    """The scores of one target as main figures, and its tables for each benchmark."""
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
    return f"published for {figure.model}, {figure.source}"


BENCHMARKS: dict[str, Benchmark] = {
    each.name: each
    for each in (
        *(MathVista(), MathVerse(), MathVision(), Mmmu(), HallusionBench(), VStar()),
        *(RefCoco(), ScreenSpot()),
    )
}
OTHER_ROWS: Sequence[Tree] = (
    # switch to another environment first, so that none of the run's environment settings are left
    {"environment": {"name": "shapes"}},
    {"environment": {"name": "vqa", "train_files": [], "test_files": ["bench"]}},
    {"reward": None, "model_reward": None, "second_opinion": None, "judge": None, "reward_model": None},
    {"warmup": None, "evaluate": {"test_size": None}, "rollout": {"stop_after_answer": False}},
)
"""Settings of a benchmark that replace the run's; settings on the command line override them."""


def chosen(words: Sequence[str]) -> dict[str, str | None]:
    """The names of the benchmarks in `bench=a,b`, each with the path in `bench.a=PATH` if given."""
    given = dict(word.split("=", 1) for word in words)
    if len(given) < len(words):
        raise ConfigError("bench or one of its paths is given twice; write one list: bench=mathvista,mmmu")
    if unknown := [key for key in given if key.partition(".")[0] != "bench"]:
        raise ConfigError(f"{unknown[0]}: no such setting; benchmarks are named by bench=mathvista,mmmu")
    names = [name.strip() for name in given.pop("bench", "").split(",") if name.strip()]
    paths = {key.removeprefix("bench."): path for key, path in given.items()}
    for name in (*names, *paths):
        if name not in BENCHMARKS:
            near = difflib.get_close_matches(name.lower(), BENCHMARKS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the benchmarks are {', '.join(BENCHMARKS)}"
            raise ConfigError(f"bench={name}: no such benchmark; {hint}")
        if paths.get(name) == "":
            raise ConfigError(f"bench.{name}= is empty; leave it out for data/{name}, or give a folder or file")
        if name not in names:
            raise ConfigError(f"bench.{name} gives the path of {name}, but bench does not name it; add bench={name}")
    if not names:
        raise ConfigError(f"bench= names no benchmark; the benchmarks are {', '.join(BENCHMARKS)}")
    return {name: paths.get(name) for name in names}


def evaluate_benchmarks(
    words: Sequence[str], benchmarks: dict[str, str | None], overrides: Sequence[str], options: EvalOptions
) -> list[BenchmarkResult]:
    """Evaluate all targets on all benchmarks, print the table and write the output files."""
    targets = parse_targets(words, options.api_key_env)
    if ignored := [word for word in overrides if re.match(r"environment\b", word)]:
        raise ConfigError(f"{ignored[0]}: a benchmark has its own rows, prompts and grader; leave it out")
    config = _settings(targets, overrides, options)
    access = make_access(config.data)
    opened = [open_benchmark(BENCHMARKS[name], path, access) for name, path in benchmarks.items()]
    wait_for(check_servers(targets, config))
    say = partial(print_progress, Console(quiet=options.quiet))
    found = []
    for each in opened:
        name = each.benchmark.name
        path = [f"bench.{name}={benchmarks[name]}"] if benchmarks[name] else []
        recipe = ["--recipe", str(options.recipe)] if options.recipe else []
        command = shlex.join(["fovea", "eval", *words, f"bench={name}", *path, *overrides, *recipe])
        again = printable(without_secrets(command))
        found.append(
            _evaluate(targets, each, config, overrides, partial(say_of, say, name), again, trust=options.trust)
        )
    _write(found, config, options)
    return found


def _settings(targets: Sequence[Target], overrides: Sequence[str], options: EvalOptions) -> Config:
    """The settings of the recipe, of the first target with settings, or the defaults; without rows."""
    changed: list[Override] = [*OTHER_ROWS, *overrides]
    if options.recipe is None and all(settings_file(target) is None for target in targets):
        return load_config([], [{"model": {"tiny": {}}}, *changed])
    return shared_settings(targets, options.recipe, changed, trust=options.trust)


def _evaluate(
    targets: Sequence[Target],
    environment: BenchmarkEnvironment,
    config: Config,
    overrides: Sequence[str],
    say: Say,
    command: str,
    *,
    trust: bool,
) -> BenchmarkResult:
    eval_set = EvalSet.of(config, "test", GivenCode(environment=environment))
    with closing(eval_set.grading):
        results = compare(targets, eval_set, overrides, say, trust=trust)
    tasks = eval_set.tasks
    return BenchmarkResult(
        benchmark=environment.benchmark,
        results=results,
        metrics=target_metrics(results),
        scores=[
            environment.benchmark.scores((tasks[row.index].row, target.accuracy(row)) for row in results.rows)
            for target in results.targets
        ],
        images_of=lambda row: [eval_set.open_image(ref) for ref in tasks[row.index].images],
        command=command,
    )


def _write(found: Sequence[BenchmarkResult], config: Config, options: EvalOptions) -> None:
    console = Console()
    console.print(benchmark_table(found))
    figures = [(each.benchmark.name, figure) for each in found for figure in each.benchmark.published]
    sources = dict.fromkeys(f"{name}: {_source(figure)}" for name, figure in figures)
    for line in (*sources, *(each.command for each in found)):
        console.print(Text(line), soft_wrap=True)
    if options.json_file is not None:
        content = {each.benchmark.name: _json(each) for each in found}
        about = {"fovea": __version__, "benchmarks": content, "settings": public_settings(config)}
        write_tree(options.json_file, about)
        console.print(Text(f"metrics and answers: {options.json_file}"))
    if options.html_file is not None:
        page = write_benchmarks(options.html_file, found, dump_config(config))
        console.print(Text(f"page: {page}"))


def _json(result: BenchmarkResult) -> Tree:
    names = [target.name for target in result.results.targets]
    scores = [{name: asdict(score) for name, score in each.items()} for each in result.scores]
    about = {
        "command": result.command,
        "published": list(map(asdict, result.benchmark.published)),
        "scores": dict(zip(names, scores, strict=True)),
    }
    return results_json(result.results, result.metrics, about)
