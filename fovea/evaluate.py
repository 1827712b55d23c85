"""`fovea eval`: every target is asked the same rows, one target after the other, and graded by the same environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from fovea.config.loading import dump_config
from fovea.config.run import Config
from fovea.data.images import OpenImage
from fovea.environments.base import Environment, Split
from fovea.environments.graders.grading import Grading
from fovea.environments.prompt_source import PromptSource, RendersPrompts
from fovea.errors import ConfigError, DataError
from fovea.evaluation.baselines import fixed_answers, majority_answers
from fovea.evaluation.comparison import Comparison, Figures, Reading, Row, figures_of
from fovea.evaluation.controls import usable_tasks, with_blank_images, with_shuffled_images
from fovea.evaluation.evaluator import AnsweredRow, Evaluator
from fovea.evaluation.json_file import write_json
from fovea.evaluation.tables import tables
from fovea.models.render import Renderer
from fovea.report.evaluation import write_evaluation
from fovea.rollout.base import Engine
from fovea.run.rollout_step import rollout_sampling
from fovea.types import Message, Prompt, Task
from fovea.utils.event_loop import wait_for

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Files that are asked for beside the tables."""

    json_file: Path | None = None
    html_file: Path | None = None


def evaluate_targets(
    words: Sequence[str], overrides: Sequence[str], *, recipe: Path | None, split: Split, written: Written
) -> list[Figures]:
    """The command: asks all targets, prints the tables, writes the files."""
    targets = parse_targets(words)
    config = shared_settings(targets, recipe, overrides)
    console = Console()
    rows = Rows.of(config, split, lambda reason: console.print(Text(f"no score, so wrong: {reason}", style="dim")))
    comparison = compare(targets, rows, overrides, lambda text: console.print(Text(text, style="dim")))
    figures = figures_of(comparison)
    title = f"{len(comparison.rows)} {split} rows of {config.environment.name}"
    for table in tables(figures, f"Accuracy in %, greedy, {title}"):
        console.print(table)
    if written.json_file is not None:
        about = {"environment": config.environment.name, "split": split, "fovea": __version__}
        write_json(written.json_file, comparison, figures, about, config.model_dump(mode="json"))
        console.print(Text(f"figures and answers: {written.json_file}"))
    if written.html_file is not None:
        page = write_evaluation(
            written.html_file,
            comparison,
            figures,
            title=title,
            images_of=lambda row: [rows.open_image(ref) for ref in rows.tasks[row.index].images],
            settings=dump_config(config),
        )
        console.print(Text(f"page: {page}"))
    return figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What all targets are asked."""

    config: Config
    environment: Environment
    grading: Grading
    tasks: Sequence[Task]
    size: int
    open_image: OpenImage

    @staticmethod
    def of(config: Config, split: Split, note: Callable[[str], None] = lambda _: None) -> Rows:
        """The rows that a run with these settings reads: `evaluate.dev_size` of dev, `evaluate.test_size` of others.

        `note` is told of answers that the grader leaves without a score.
        """
        made = make_environment(config)
        tasks = made.environment.tasks(split)
        size = config.evaluate.dev_size if split == "dev" else config.evaluate.test_size
        return Rows(
            config=config,
            environment=made.environment,
            grading=made.grading.for_readings(note),
            tasks=tasks,
            size=min(size or len(tasks), len(tasks)),
            open_image=make_opener(config.data, Path(config.run_dir)),
        )


def compare(targets: Sequence[Target], rows: Rows, overrides: Sequence[str], say: Say) -> Comparison:
    """All targets' readings over the rows that every one of them could be asked. One model is in memory at a time."""
    if rows.config.threads is not None:
        torch.set_num_threads(rows.config.threads)
    readings = [
        wait_for(read_target(target, rows, overrides, partial(_say_of, say, target.name))) for target in targets
    ]
    common = set.intersection(*(set(reading.greedy) for reading in readings))
    if not common:
        raise DataError(f"no row could be asked of every target; of {targets[0].name}: {_reasons(readings[0])}")
    index_of = {row.id: row.index for row in readings[0].greedy.values() if row.id in common}
    facts = [_row(rows, index) for index in sorted(index_of.values())]
    return Comparison(rows=tuple(facts), readings=tuple(readings))


def _say_of(say: Say, name: str, text: str) -> None:
    say(f"{name}: {text}")


def _reasons(reading: Reading) -> str:
    return next(iter(reading.skipped.values()), "every row was read")


def _row(rows: Rows, index: int) -> Row:
    task, key = rows.tasks[index], rows.config.evaluate.image_type_key
    if key is not None and key not in task.row:
        raise ConfigError(
            f"evaluate.image_type_key={key}, but {task.id} has no such key, only {', '.join(task.row) or 'none'}; "
            "set one that all rows have"
        )
    return Row(
        id=task.id,
        index=index,
        kind=task.kind,
        question=task.question,
        truth=task.answer,
        image_type=None if key is None else str(task.row[key]),
    )


async def read_target(target: Target, rows: Rows, overrides: Sequence[str], say: Say) -> Reading:
    """All that a target says."""
    if isinstance(target, Baseline):
        return await _read_baseline(target, rows, say)
    say("loading the model")
    model = open_model(target, rows.config, overrides)
    engine = make_engine(_engine_settings(rows.config, model), model.parts, model.vlm)
    await SharedWeights(model, engine).push(0)
    try:
        return await _read_model(target.name, engine, _source(rows, _renderer(rows, model)), rows, say)
    finally:
        await engine.close()


def _engine_settings(config: Config, model: OpenedModel) -> Config:
    """Those of the rows; the model's own say what it is. Nothing is kept for an update that never comes."""
    rollout = config.rollout.model_copy(update={"reuse_gib": 0.0})
    return config.model_copy(update={"model": model.config.model, "rollout": rollout})


def _renderer(rows: Rows, model: OpenedModel) -> Renderer:
    settings = model.config.model
    return Renderer(model.parts, rows.open_image, min_pixels=settings.min_pixels, max_pixels=settings.max_pixels)


def _source(rows: Rows, renderer: RendersPrompts) -> PromptSource:
    data = rows.config.data
    return PromptSource(
        rows.tasks,
        rows.environment,
        renderer,
        max_prompt_tokens=data.max_prompt_tokens,
        on_bad_row=data.on_bad_row,
        cache_gib=data.prompt_cache_gib,
    )


async def _read_model(name: str, engine: Engine, source: PromptSource, rows: Rows, say: Say) -> Reading:
    config = rows.config
    evaluator = make_evaluator(config, engine, rows.environment, rows.grading)
    say(f"{rows.size} rows, greedy")
    greedy = _by_id(await evaluator.answers(source, rows.size))
    samples: Mapping[str, AnsweredRow] = {}
    if n := config.evaluate.samples_per_prompt:
        say(f"{rows.size} rows, {n} answers each at temperature {config.rollout.temperature:g}")
        sampling = rollout_sampling(config)
        samples = _by_id(await evaluator.answers(source, rows.size, sampling=sampling, n=n, seed=config.seed))
    shuffled, blank = await _controls(evaluator, source, rows, say) if config.evaluate.image_controls else ({}, {})
    return Reading(
        target=name, greedy=greedy, samples=samples, shuffled=shuffled, blank=blank, skipped=dict(source.bad_rows)
    )


async def _controls(
    evaluator: Evaluator, source: PromptSource, rows: Rows, say: Say
) -> tuple[Mapping[str, AnsweredRow], Mapping[str, AnsweredRow]]:
    """The questions with the images of others, and with grey ones; empty where no row has an image."""
    tasks = [task for task in usable_tasks(source, rows.size) if task.images]
    if not tasks:
        return {}, {}
    say(f"{len(tasks)} rows with shuffled images, and with blank ones")
    changed = (with_shuffled_images(tasks), with_blank_images(tasks, rows.open_image))
    shuffled, blank = [_by_id(await evaluator.answers(source.with_tasks(each))) for each in changed]
    return shuffled, blank


def _by_id(answered: Sequence[AnsweredRow]) -> dict[str, AnsweredRow]:
    repeated = [name for name, count in Counter(row.id for row in answered).items() if count > 1]
    assert not repeated, f"ids of tasks are unique in a split, but {repeated[0]} comes twice"
    return {row.id: row for row in answered}


async def _read_baseline(target: Baseline, rows: Rows, say: Say) -> Reading:
    environment = rows.environment
    if target.kind == "majority":
        say("counting the answers of training rows")
        answer_of = majority_answers(environment, environment.tasks("train"))
    elif target.kind == "gold":
        answer_of = environment.target
    else:
        answer_of = partial(_constant, target.text)
    source = _source(rows, NoRenderer())
    greedy = await fixed_answers(environment, rows.grading, source, rows.size, answer_of)
    return Reading(target=target.name, greedy=greedy, skipped=dict(source.bad_rows), is_model=False)


def _constant(text: str, _task: Task) -> str:
    return text


class NoRenderer:
    """A baseline reads no prompt."""

    def prompt(self, messages: Sequence[Message], where: str = "") -> Prompt:
        raise AssertionError(f"a baseline was to read the prompt of {where}, {len(messages)} messages")
