"""`fovea eval`: several targets, one after the other, answer the same rows and are graded by the same environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.text import Text

from fovea import __version__
from fovea.commands.targets import (
    CONSTANT,
    Baseline,
    OpenedModel,
    ServerTarget,
    Target,
    open_model,
    parse_targets,
    settings_file,
    shared_settings,
)
from fovea.config.backends import EmbeddedSettings
from fovea.config.loading import dump_config, keys_of, load_config, public_settings
from fovea.config.recipes import Override
from fovea.config.run import TIME, Config
from fovea.data.prompt_source import PromptSource, RendersPrompts
from fovea.evaluation.answer_logprobs import answer_logprobs
from fovea.evaluation.baselines import baseline_answers, majority_answers
from fovea.evaluation.chat_server import ChatModel, EmptyPrompts, ServerAnswers
from fovea.evaluation.comparison import EvalResults, TargetAnswers, TargetMetrics, target_metrics
from fovea.evaluation.controls import image_controls, pictured_tasks, usable_tasks
from fovea.evaluation.dependence import dependence
from fovea.evaluation.evaluator import EngineAnswers, Evaluator, task_row
from fovea.evaluation.json_file import write_json
from fovea.evaluation.records import AnsweredRow
from fovea.models.processor import describe_banned
from fovea.models.render import Renderer
from fovea.report.evaluation import write_evaluation
from fovea.report.tables import tables
from fovea.rollout.base import Engine
from fovea.rollout.embedded.arguments import make_engine
from fovea.run.fingerprint import GivenCode
from fovea.run.sampling import evaluation_sampling
from fovea.wiring.data import PROMPT_CACHE_GIB, make_renderer
from fovea.wiring.engine import SERVER_BOUNDS, make_evaluator
from fovea.wiring.environment import make_environment
from fovea.wiring.given import rows_as_files
from fovea.wiring.images import make_opener
from fovea.wiring.tools import use_of_model, use_of_server, with_tools
from fovea_gym.environments.base import Environment, Split
from fovea_gym.errors import DataError
from fovea_gym.graders.grading import Grading
from fovea_gym.rows.images import ImageOpener
from fovea_gym.rows.rows import InMemory
from fovea_gym.tools.base import Tool
from fovea_gym.tools.session import ToolUse
from fovea_gym.types import Task
from fovea_gym.utils.event_loop import wait_for
from fovea_gym.utils.http_json import JsonServer, bearer
from fovea_gym.utils.shown_text import printable, without_secrets

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """Options of `fovea eval`."""

    recipe: Path | None = None
    split: Split = "test"
    json_file: Path | None = None
    """Written in addition to the printed tables, like `html_file`."""
    html_file: Path | None = None
    trust: bool = False
    """Run code that settings in the targets' folders name."""
    api_key_env: str | None = None
    """Environment variable with the key for servers."""
    quiet: bool = False
    """Do not print the progress."""


def evaluate_targets(
    words: Sequence[str],
    overrides: Sequence[Override],
    options: EvalOptions,
    *,
    given: GivenCode | None = None,
    rows: InMemory | None = None,
) -> list[TargetMetrics]:
    """Evaluate all targets, print tables and write files; `rows` replace the rows of the test split."""
    targets = parse_targets(words, options.api_key_env)
    say = partial(print_progress, Console(quiet=options.quiet))
    with ExitStack() as stack:
        if rows is not None and options.recipe is None and all(settings_file(target) is None for target in targets):
            # the targets name the models; environment and reward are the user's
            is_set = "environment.train_files" in keys_of(overrides)
            others: list[Override] = [] if is_set else [{"environment": {"train_files": []}}]
            config = load_config([], [{"model": {"tiny": {}}}, {"environment": {"name": "rows"}}, *overrides, *others])
        else:
            config = shared_settings(targets, options.recipe, overrides, trust=options.trust)
        if rows is not None:  # the test split, in files that exist until the evaluation ends
            given_rows = rows_as_files(config.with_own_files, {"test": rows}, arguments={"test": "rows"})
            written = stack.enter_context(given_rows)
            folder = stack.enter_context(TemporaryDirectory(prefix="fovea-rows-"))
            for remark in written.remarks:
                say(remark)
            written.move_into(Path(folder))
            config = written.config.with_files_of(folder)
        wait_for(check_servers(targets, config))
        eval_set = EvalSet.of(config, options.split, given)
        stack.enter_context(closing(eval_set.grading))
        results = compare(targets, eval_set, overrides, say, trust=options.trust)
        return _write(results, eval_set, options)


def print_progress(console: Console, text: str) -> None:
    """Print a dim line, without passwords and keys."""
    console.print(Text(printable(without_secrets(text)), style="dim"))


def _write(results: EvalResults, eval_set: EvalSet, options: EvalOptions) -> list[TargetMetrics]:
    config, console = eval_set.config, Console()
    metrics = target_metrics(results)
    # given rows do not belong to a named data set
    of_what = "" if config.environment.name == "rows" else f" of {config.environment.name}"
    title = f"{len(results.rows)} {options.split} rows{of_what}"
    for table in tables(metrics, f"Accuracy in %, greedy, {title}"):
        console.print(table)
    if options.json_file is not None:
        about = {"environment": config.environment.name, "split": options.split, "fovea": __version__}
        write_json(options.json_file, results, metrics, about, public_settings(config))
        console.print(Text(f"metrics and answers: {options.json_file}"))
    if options.html_file is not None:
        page = write_evaluation(
            options.html_file,
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
    tools: Sequence[Tool] = ()
    """Tools that the model may call in addition to the environment's tools."""

    @staticmethod
    def of(config: Config, split: Split, given: GivenCode | None = None) -> EvalSet:
        """The rows that a run with these settings evaluates on: `evaluate.dev_size` dev rows, or else `test_size`."""
        if TIME in config.run_dir:  # a recipe without a run: images are fetched into the cache
            config = config.model_copy(update={"run_dir": str(Path(config.data.cache_dir).expanduser())})
        given = given or GivenCode()
        made = make_environment(config, given.environment, given.rewards, given.tools)
        tasks = made.environment.tasks(split)
        size = config.evaluate.dev_size if split == "dev" else config.evaluate.test_size
        return EvalSet(
            config=config,
            environment=made.environment,
            grading=made.grading,
            tasks=tasks,
            size=min(size or len(tasks), len(tasks)),
            open_image=make_opener(config.data, Path(config.run_dir)),
            tools=made.tools,
        )


def compare(
    targets: Sequence[Target], eval_set: EvalSet, overrides: Sequence[Override], say: Say, *, trust: bool = False
) -> EvalResults:
    """Answers of all targets to the rows that every target answered; one model is in memory at a time."""
    if eval_set.config.threads is not None:
        torch.set_num_threads(eval_set.config.threads)
    answers = [
        wait_for(ask_target(target, eval_set, overrides, partial(say_of, say, target.name), trust=trust))
        for target in targets
    ]
    common = set.intersection(*(set(each.greedy) for each in answers))
    if not common:
        reason = next(iter([*answers[0].skipped.values(), *answers[0].unscored]), "no row was skipped")
        raise DataError(f"no row has a scored answer from every target; {targets[0].name}: {reason}")
    index_of = {row.id: row.index for row in answers[0].greedy.values() if row.id in common}
    key = eval_set.config.evaluate.image_type_key
    rows = [task_row(eval_set.tasks[index], index, key) for index in sorted(index_of.values())]
    return EvalResults(rows=tuple(rows), targets=tuple(answers))


def say_of(say: Say, name: str, text: str) -> None:
    say(f"{name}: {text}")


async def ask_target(
    target: Target, eval_set: EvalSet, overrides: Sequence[Override], say: Say, *, trust: bool = False
) -> TargetAnswers:
    """The answers of one target, whose model is loaded and freed again."""
    if isinstance(target, Baseline):
        return await _ask_baseline(target, eval_set, say)
    if isinstance(target, ServerTarget):
        return await _ask_server(target, eval_set, say)
    say("loading the model")
    model = open_model(target, eval_set.config, overrides, trust=trust)
    eval_set = called_by(model, eval_set, say)
    engine = engine_of(model, eval_set.config)
    # closed even after an error: the next target's engine needs the memory
    try:
        environment, max_tokens = eval_set.environment, eval_set.config.rollout.max_episode_tokens
        answers_of = EngineAnswers(engine, environment, eval_set.grading, max_tokens)
        evaluator = make_evaluator(eval_set.config, environment, answers_of)
        source = source_of(eval_set, renderer_of(eval_set, model))
        answers = await _ask_model(target.name, evaluator, source, eval_set, say)
    finally:
        await engine.close()
    answers = replace(answers, banned=describe_banned(model.processor))
    return _with_dependence(answers, model, source, eval_set, say) if answers.blank else answers


def _with_dependence(
    answers: TargetAnswers, model: OpenedModel, source: PromptSource, eval_set: EvalSet, say: Say
) -> TargetAnswers:
    """The answers with their dependence on the pictures, which the controls replace."""
    tasks = [task for task in usable_tasks(source, eval_set.size) if task.images]
    say(f"log-probs of the answers to {len(tasks)} rows with shuffled images, and with blank ones")
    scores = partial(
        answer_logprobs,
        model.vlm,
        max_tokens=model.config.train.max_tokens_per_microbatch,
        temperature=model.config.rollout.temperature,
    )
    changed = image_controls(source, tasks, eval_set.open_image)
    shuffled, blank = dependence(source, changed, answers.greedy, scores)
    return replace(answers, shuffled_dependence=shuffled, blank_dependence=blank)


def called_by(model: OpenedModel, eval_set: EvalSet, say: Say) -> EvalSet:
    """The rows with their tools, in the way this model calls them."""
    rendered = renderer_of(eval_set, model), eval_set.open_image
    return _with_tools(eval_set, partial(use_of_model, eval_set.config, model.processor, *rendered, say))


def _with_tools(eval_set: EvalSet, make_use: Callable[[], ToolUse]) -> EvalSet:
    environment = with_tools(eval_set.config, eval_set.environment, eval_set.tools, make_use)
    return replace(eval_set, environment=environment)


def engine_of(model: OpenedModel, config: Config) -> Engine:
    """The engine for the answers, whatever the training engine is: it shares the network that is opened here."""
    settings = config.rollout.engine if isinstance(config.rollout.engine, EmbeddedSettings) else EmbeddedSettings()
    # no update follows, so the engine need not keep activations for reuse
    engine = make_engine(settings.model_copy(update={"reuse_gib": 0.0}), model.processor, model.vlm)
    engine.load_weights(dict(engine.own_weights()), 0)
    return engine


def renderer_of(eval_set: EvalSet, model: OpenedModel) -> Renderer:
    tokens = eval_set.config.rollout.max_new_tokens
    return make_renderer(model.config.model, model.processor, eval_set.open_image, max_new_tokens=tokens)


def source_of(eval_set: EvalSet, renderer: RendersPrompts) -> PromptSource:
    data = eval_set.config.data
    return PromptSource(
        eval_set.tasks,
        eval_set.environment,
        renderer,
        max_prompt_tokens=data.max_prompt_tokens,
        on_bad_row=data.on_bad_row,
        cache_gib=PROMPT_CACHE_GIB,
    )


async def check_servers(targets: Sequence[Target], config: Config) -> None:
    """ConfigError if a server does not answer, before any row is read rather than after hours with other targets."""
    for target in targets:
        if isinstance(target, ServerTarget):
            async with _model_of(target, config):
                pass


@asynccontextmanager
async def _model_of(target: ServerTarget, config: Config) -> AsyncIterator[ChatModel]:
    server = JsonServer(target.url, SERVER_BOUNDS, bearer(target.api_key_env, "api_key_env"))
    try:
        yield await ChatModel.of(server, target.model, config.model.chat_template_kwargs)
    finally:
        await server.close()


async def _ask_server(target: ServerTarget, eval_set: EvalSet, say: Say) -> TargetAnswers:
    config = eval_set.config
    eval_set = _with_tools(eval_set, partial(use_of_server, config, eval_set.open_image, say))
    async with _model_of(target, config) as model:
        environment = eval_set.environment
        answers_of = ServerAnswers(model, environment, eval_set.grading, eval_set.open_image)
        evaluator = make_evaluator(config, environment, answers_of)
        return await _ask_model(target.name, evaluator, source_of(eval_set, EmptyPrompts()), eval_set, say)


async def _ask_model(
    name: str, evaluator: Evaluator, source: PromptSource, eval_set: EvalSet, say: Say
) -> TargetAnswers:
    config = eval_set.config
    say(f"{eval_set.size} rows, greedy")
    unscored, later = list[str](), list[str]()
    greedy = _by_id(await evaluator.answers(source, eval_set.size, unscored=unscored))
    samples = dict[str, AnsweredRow]()
    if n := config.evaluate.samples_per_prompt:
        sampling = evaluation_sampling(config, eval_set.environment)
        say(f"{eval_set.size} rows, {n} answers each at temperature {sampling.temperature:g}")
        samples = _by_id(
            await evaluator.answers(source, eval_set.size, sampling=sampling, n=n, seed=config.seed, unscored=later)
        )
    shuffled, blank = dict[str, AnsweredRow](), dict[str, AnsweredRow]()
    if config.evaluate.image_controls and (tasks := pictured_tasks(source, eval_set.size, say)):
        say(f"{len(tasks)} rows with shuffled images, and with blank ones")
        changed = image_controls(source, tasks, eval_set.open_image)
        shuffled, blank = [_by_id(await evaluator.answers(each, unscored=later)) for each in changed]
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


def _say_left_out(unscored: Sequence[str], say: Say) -> None:
    for reason in unscored:
        say(f"not scored, left out: {reason}")


def _by_id(answered: Sequence[AnsweredRow]) -> dict[str, AnsweredRow]:
    repeated = [name for name, count in Counter(row.id for row in answered).items() if count > 1]
    if repeated:
        raise DataError(f"two rows of the split have the id {repeated[0]!r}; give every row of a split a unique id")
    return {row.id: row for row in answered}


async def _ask_baseline(target: Baseline, eval_set: EvalSet, say: Say) -> TargetAnswers:
    environment = eval_set.environment
    if target.name == "majority":
        say("counting the answers of training rows")
        answer_of = majority_answers(environment, environment.tasks("train"))
    else:
        text = target.name.removeprefix(CONSTANT)
        answer_of = environment.target if target.name == "gold" else lambda _: text
    source = source_of(eval_set, EmptyPrompts())
    unscored = list[str]()
    answers = await baseline_answers(environment, eval_set.grading, source, eval_set.size, answer_of, unscored=unscored)
    _say_left_out(unscored, say)
    return TargetAnswers(
        name=target.name,
        greedy=_by_id(answers),
        skipped=dict(source.bad_rows),
        unscored=tuple(unscored),
        is_model=False,
    )
