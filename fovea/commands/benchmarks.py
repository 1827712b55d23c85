"""`fovea eval bench=...`: several targets answer published benchmarks, one benchmark after the other."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text

from fovea import __version__
from fovea.commands.evaluate import EvalSet, OutputFiles, Say, check_servers, compare
from fovea.commands.targets import Target, parse_targets, settings_file, shared_settings
from fovea.config.base import Tree
from fovea.config.loading import dump_config, load_config, public_settings
from fovea.config.recipes import Override
from fovea.config.run import Config
from fovea.errors import ConfigError
from fovea.evaluation.benchmarks.base import Benchmark
from fovea.evaluation.benchmarks.environment import BenchmarkEnvironment, open_benchmark
from fovea.evaluation.benchmarks.hallusionbench import HallusionBench
from fovea.evaluation.benchmarks.mathverse import MathVerse
from fovea.evaluation.benchmarks.mathvision import MathVision
from fovea.evaluation.benchmarks.mathvista import MathVista
from fovea.evaluation.benchmarks.mmmu import Mmmu
from fovea.evaluation.comparison import target_metrics
from fovea.evaluation.json_file import results_json, write_tree
from fovea.report.benchmarks import BenchmarkResult, below_table, benchmark_table, write_benchmarks
from fovea.run.fingerprint import GivenCode
from fovea.utils.event_loop import wait_for
from fovea.utils.shown_text import printable, without_secrets
from fovea.wiring.images import make_access

BENCHMARKS: dict[str, Benchmark] = {
    each.name: each for each in (MathVista(), MathVerse(), MathVision(), Mmmu(), HallusionBench())
}
OTHER_ROWS: Sequence[Tree] = (
    # first another environment than the run's, so that none of its settings is left
    {"environment": {"name": "shapes"}},
    {"environment": {"name": "vqa", "train_files": [], "test_files": ["bench"]}},
    {"reward": None, "model_reward": None, "second_opinion": None, "judge": None, "reward_model": None},
    {"warmup": None, "evaluate": {"test_size": None}, "rollout": {"stop_after_answer": False}},
)
"""Settings that a benchmark brings in place of the run's; settings on the command line override them."""


def chosen(words: Sequence[str]) -> dict[str, str | None]:
    """The names of the benchmarks in `bench=a,b`, each with its `bench.a=PATH`, if there is one."""
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
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(BENCHMARKS)}"
            raise ConfigError(f"bench={name}: no such benchmark; {hint}")
        if paths.get(name) == "":
            raise ConfigError(f"bench.{name}= names no place; leave it out for data/{name}, or give a folder or file")
        if name not in names:
            raise ConfigError(f"bench.{name} says where {name} is, and bench does not name it; add bench={name}")
    if not names:
        raise ConfigError(f"bench= names no benchmark; there are {', '.join(BENCHMARKS)}")
    return {name: paths.get(name) for name in names}


def evaluate_benchmarks(  # noqa: PLR0913 (each is an option of the command)
    words: Sequence[str],
    benchmarks: dict[str, str | None],
    overrides: Sequence[str],
    *,
    recipe: Path | None,
    output_files: OutputFiles,
    trust: bool = False,
    api_key_env: str | None = None,
    quiet: bool = False,
) -> list[BenchmarkResult]:
    """Evaluate all targets on all benchmarks, print the table and write the output files."""
    targets = parse_targets(words, api_key_env)
    if ignored := [word for word in overrides if re.match(r"environment\b", word)]:
        raise ConfigError(f"{ignored[0]}: a benchmark has its own rows, prompts and verdicts; leave it out")
    config = _settings(targets, recipe, overrides, trust=trust)
    access = make_access(config.data)
    opened = [open_benchmark(BENCHMARKS[name], path, access) for name, path in benchmarks.items()]
    wait_for(check_servers(targets, config))
    progress = Console(quiet=quiet)

    def say(name: str, text: str) -> None:
        progress.print(Text(printable(without_secrets(f"{name}: {text}")), style="dim"))

    found = []
    for each in opened:
        name = each.benchmark.name
        path = [f"bench.{name}={benchmarks[name]}"] if benchmarks[name] else []
        options = ["--recipe", str(recipe)] if recipe else []
        again = shlex.join(["fovea", "eval", *words, f"bench={name}", *path, *overrides, *options])
        again = printable(without_secrets(again))
        found.append(_evaluate(targets, each, config, overrides, partial(say, name), again, trust=trust))
    _write(found, config, output_files)
    return found


def _settings(targets: Sequence[Target], recipe: Path | None, overrides: Sequence[str], *, trust: bool) -> Config:
    """The settings of the recipe, of the first target that has some, or the defaults; without rows."""
    changed: list[Override] = [*OTHER_ROWS, *overrides]
    if recipe is None and all(settings_file(target) is None for target in targets):
        return load_config([], [{"model": {"tiny": {}}}, *changed])
    return shared_settings(targets, recipe, changed, trust=trust)


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


def _write(found: Sequence[BenchmarkResult], config: Config, output_files: OutputFiles) -> None:
    """Print the table and write the output files."""
    console = Console()
    console.print(benchmark_table(found))
    for line in below_table(found):
        console.print(Text(line), soft_wrap=True)
    if output_files.json_file is not None:
        content = {each.benchmark.name: _json(each) for each in found}
        about = {"fovea": __version__, "benchmarks": content, "settings": public_settings(config)}
        write_tree(output_files.json_file, about)
        console.print(Text(f"metrics and answers: {output_files.json_file}"))
    if output_files.html_file is not None:
        page = write_benchmarks(output_files.html_file, found, dump_config(config))
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
