"""`fovea eval`: several targets answer the same rows, one target after the other, graded by the same environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from fovea import __version__
from fovea.build.data import make_opener
from fovea.build.engine import make_engine, make_evaluator
from fovea.build.environment import make_environment
from fovea.build.targets import Baseline, OpenedModel, Target, open_model, parse_targets, shared_settings
from fovea.cluster.local import SharedWeights
from fovea.config.loading import dump_config, public_settings
from fovea.config.run import TIME, Config
from fovea.data.images import ImageOpener
from fovea.environments.base import Environment, Split
from fovea.environments.graders.grading import Grading
from fovea.environments.prompt_source import PromptSource, RendersPrompts
from fovea.errors import DataError
from fovea.evaluation.baselines import baseline_answers, majority_answers
from fovea.evaluation.comparison import EvalResults, EvalRow, TargetAnswers, TargetMetrics, target_metrics
from fovea.evaluation.controls import usable_tasks, with_blank_images, with_shuffled_images
from fovea.evaluation.evaluator import AnsweredRow, Evaluator, image_type_of
from fovea.evaluation.json_file import write_json
from fovea.evaluation.tables import tables
from fovea.models.processor import describe_banned
from fovea.models.render import Renderer
from fovea.report.evaluation import write_evaluation
from fovea.rollout.base import Engine
from fovea.run.rollout_step import rollout_sampling
from fovea.types import Message, Prompt, Task
from fovea.utils.event_loop import wait_for
from fovea.utils.shown_text import printable, without_secrets

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFiles:
    """Optional output files of `fovea eval`, written in addition to the printed tables."""

    json_file: Path | None = None
    html_file: Path | None = None


def evaluate_targets(
    words: Sequence[str],
    overrides: Sequence[str],
    *,
    recipe: Path | None,
    split: Split,
    output_files: OutputFiles,
    trust: bool = False,
    quiet: bool = False,
) -> list[TargetMetrics]:
    """Evaluate all targets, print the tables and write the output files.

    `trust` lets code run that the settings of the targets' own folders name; `quiet` leaves out the progress.
    """
    targets = parse_targets(words)
    config = shared_settings(targets, recipe, overrides, trust=trust)
    console, progress = Console(), Console(quiet=quiet)
    eval_set = EvalSet.of(config, split)
    with closing(eval_set.grading):
        results = compare(
            targets,
            eval_set,
            overrides,
            lambda text: progress.print(Text(printable(without_secrets(text)), style="dim")),
            trust=trust,
        )
    metrics = target_metrics(results)
    title = f"{len(results.rows)} {split} rows of {config.environment.name}"
    for table in tables(metrics, f"Accuracy in %, greedy, {title}"):
        console.print(table)
    if output_files.json_file is not None:
        about = {"environment": config.environment.name, "split": split, "fovea": __version__}
        write_json(output_files.json_file, results, metrics, about, public_settings(config))
        console.print(Text(f"metrics and answers: {output_files.json_file}"))
    if output_files.html_file is not None:
        page = write_evaluation(
            output_files.html_file,
            results,
            metrics,
            title=title,
            images_of=lambda row: [eval_set.open_image(ref) for ref in eval_set.tasks[row.index].images],
            settings=dump_config(config),
        )
        console.print(Text(f"page: {page}"))
    return metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """The rows that every target is evaluated on, with their environment and settings."""

    config: Config
    environment: Environment
    grading: Grading
    tasks: Sequence[Task]
    size: int
    open_image: ImageOpener

    @staticmethod
    def of(config: Config, split: Split) -> EvalSet:
        """The rows that a run with these settings evaluates on: `evaluate.dev_size` of dev, else `test_size`."""
        if TIME in config.run_dir:  # a recipe's, of no run yet: images are fetched into the cache
            config = config.model_copy(update={"run_dir": str(Path(config.data.cache_dir).expanduser())})
        made = make_environment(config)
        tasks = made.environment.tasks(split)
        size = config.evaluate.dev_size if split == "dev" else config.evaluate.test_size
        return EvalSet(
            config=config,
            environment=made.environment,
            grading=made.grading,
            tasks=tasks,
            size=min(size or len(tasks), len(tasks)),
            open_image=make_opener(config.data, Path(config.run_dir)),
        )


def compare(
    targets: Sequence[Target], eval_set: EvalSet, overrides: Sequence[str], say: Say, *, trust: bool = False
) -> EvalResults:
    """Answers of all targets, on the rows that every target answered; one model is in memory at a time."""
    if eval_set.config.threads is not None:
        torch.set_num_threads(eval_set.config.threads)
    answers = [
        wait_for(ask_target(target, eval_set, overrides, partial(_say_of, say, target.name), trust=trust))
        for target in targets
    ]
    common = set.intersection(*(set(each.greedy) for each in answers))
    if not common:
        raise DataError(f"no row has a scored answer of every target; {targets[0].name}: {_first_reason(answers[0])}")
    index_of = {row.id: row.index for row in answers[0].greedy.values() if row.id in common}
    rows = [_row(eval_set, index) for index in sorted(index_of.values())]
    return EvalResults(rows=tuple(rows), targets=tuple(answers))


def _say_of(say: Say, name: str, text: str) -> None:
    say(f"{name}: {text}")


def _first_reason(answers: TargetAnswers) -> str:
    return next(iter([*answers.skipped.values(), *answers.unscored]), "no row was skipped")


def _row(eval_set: EvalSet, index: int) -> EvalRow:
    task = eval_set.tasks[index]
    return EvalRow(
        id=task.id,
        index=index,
        kind=task.kind,
        question=task.question,
        truth=task.answer,
        image_type=image_type_of(task, eval_set.config.evaluate.image_type_key),
    )


async def ask_target(
    target: Target, eval_set: EvalSet, overrides: Sequence[str], say: Say, *, trust: bool = False
) -> TargetAnswers:
    """The answers of one target, which is loaded for it and freed again."""
    if isinstance(target, Baseline):
        return await _ask_baseline(target, eval_set, say)
    say("loading the model")
    model = open_model(target, eval_set.config, overrides, trust=trust)
    engine = make_engine(_engine_settings(eval_set.config, model), model.processor, model.vlm)
    await SharedWeights(model, engine).push(0)
    # closed on every way out: the next target's engine needs the memory
    try:
        answers = await _ask_model(target.name, engine, _source(eval_set, _renderer(eval_set, model)), eval_set, say)
        return replace(answers, banned=describe_banned(model.processor))
    finally:
        await engine.close()


def _engine_settings(config: Config, model: OpenedModel) -> Config:
    """The evaluation's settings with the `model` section of the checkpoint."""
    # no update follows, so that the engine need not keep activations for reuse
    engine = config.rollout.engine.model_copy(update={"reuse_gib": 0.0})
    rollout = config.rollout.model_copy(update={"engine": engine})
    return config.model_copy(update={"model": model.config.model, "rollout": rollout})


def _renderer(eval_set: EvalSet, model: OpenedModel) -> Renderer:
    settings = model.config.model
    return Renderer(
        model.processor, eval_set.open_image, min_pixels=settings.min_pixels, max_pixels=settings.max_pixels
    )


def _source(eval_set: EvalSet, renderer: RendersPrompts) -> PromptSource:
    data = eval_set.config.data
    return PromptSource(
        eval_set.tasks,
        eval_set.environment,
        renderer,
        max_prompt_tokens=data.max_prompt_tokens,
        on_bad_row=data.on_bad_row,
        cache_gib=data.prompt_cache_gib,
    )


async def _ask_model(name: str, engine: Engine, source: PromptSource, eval_set: EvalSet, say: Say) -> TargetAnswers:
    config = eval_set.config
    evaluator = make_evaluator(config, engine, eval_set.environment, eval_set.grading)
    say(f"{eval_set.size} rows, greedy")
    unscored, later = list[str](), list[str]()
    greedy = _by_id(await evaluator.answers(source, eval_set.size, unscored=unscored))
    samples: Mapping[str, AnsweredRow] = {}
    if n := config.evaluate.samples_per_prompt:
        say(f"{eval_set.size} rows, {n} answers each at temperature {config.rollout.temperature:g}")
        sampling = rollout_sampling(config)
        answered = await evaluator.answers(
            source, eval_set.size, sampling=sampling, n=n, seed=config.seed, unscored=later
        )
        samples = _by_id(answered)
    shuffled: Mapping[str, AnsweredRow] = {}
    blank: Mapping[str, AnsweredRow] = {}
    if config.evaluate.image_controls:
        shuffled, blank = await _controls(evaluator, source, eval_set, say, later)
    _say_left_out([*unscored, *later], say)
    return TargetAnswers(
        name=name,
        greedy=greedy,
        samples=samples,
        shuffled=shuffled,
        blank=blank,
        skipped=dict(source.bad_rows),
        unscored=tuple(unscored),
    )


async def _controls(
    evaluator: Evaluator, source: PromptSource, eval_set: EvalSet, say: Say, unscored: list[str]
) -> tuple[dict[str, AnsweredRow], dict[str, AnsweredRow]]:
    """Greedy answers with shuffled images and with blank ones (image ablation); empty where no row has an image."""
    tasks = [task for task in usable_tasks(source, eval_set.size) if task.images]
    if not tasks:
        return {}, {}
    say(f"{len(tasks)} rows with shuffled images, and with blank ones")
    changed = (with_shuffled_images(tasks), with_blank_images(tasks, eval_set.open_image))
    shuffled, blank = [_by_id(await evaluator.answers(source.with_tasks(each), unscored=unscored)) for each in changed]
    return shuffled, blank


def _say_left_out(unscored: Sequence[str], say: Say) -> None:
    for reason in unscored:
        say(f"not scored, left out: {reason}")


def _by_id(answered: Sequence[AnsweredRow]) -> dict[str, AnsweredRow]:
    repeated = [name for name, count in Counter(row.id for row in answered).items() if count > 1]
    assert not repeated, f"ids of tasks are unique in a split, but {repeated[0]} comes twice"
    return {row.id: row for row in answered}


async def _ask_baseline(target: Baseline, eval_set: EvalSet, say: Say) -> TargetAnswers:
    environment = eval_set.environment
    if target.kind == "majority":
        say("counting the answers of training rows")
        answer_of = majority_answers(environment, environment.tasks("train"))
    elif target.kind == "gold":
        answer_of = environment.target
    else:
        answer_of = partial(_constant, target.text)
    source = _source(eval_set, _NoRenderer())
    unscored = list[str]()
    greedy = await baseline_answers(environment, eval_set.grading, source, eval_set.size, answer_of, unscored=unscored)
    _say_left_out(unscored, say)
    return TargetAnswers(
        name=target.name,
        greedy=greedy,
        skipped=dict(source.bad_rows),
        unscored=tuple(unscored),
        is_model=False,
    )


def _constant(text: str, _task: Task) -> str:
    return text


class _NoRenderer:
    """Stands in for a renderer with baselines, which need no token ids."""

    def fewest_tokens(self, messages: Sequence[Message], where: str = "") -> int:
        raise AssertionError(
            f"baselines render no prompts, but {where} asked for the length of {len(messages)} messages"
        )

    def prompt(self, messages: Sequence[Message], where: str = "") -> Prompt:
        raise AssertionError(f"baselines render no prompts, but {where} asked for one of {len(messages)} messages")

    def observation(self, messages: Sequence[Message], *, after: int, where: str = "") -> Prompt:
        raise AssertionError(f"baselines give one answer, but {where} asked for a turn after token {after}")
