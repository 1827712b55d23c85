"""Builder of a run from its settings; only this package names concrete backends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

from fovea.config.model import Model
from fovea.config.run import Config
from fovea.data.bad_rows import BAD_ROWS_FILE, BadRows
from fovea.data.curriculum import CurriculumProgress
from fovea.data.order import Order
from fovea.data.prompt_source import PromptSource
from fovea.errors import ModelError
from fovea.evaluation.evaluator import EngineAnswers
from fovea.metrics.findings import FindingsWatch
from fovea.metrics.jsonl import METRICS_FILE
from fovea.metrics.log import JsonlSink, MetricsLog, Phases, Sink, read_metrics
from fovea.metrics.progress import CONSOLE_FILE, Progress
from fovea.models.families.auto import layout_of
from fovea.models.modules import config_of
from fovea.models.plain import PlainVLM
from fovea.models.processor import Processor, load_processor
from fovea.models.render import Renderer, images_of
from fovea.report.about import HINTS_FILE, add_hint
from fovea.rollout.embedded.plain import PlainEngine
from fovea.run.augmentations import in_one_turn
from fovea.run.checkpoint import Checkpoints, SavedCheckpoint
from fovea.run.context import Run, TaskStream
from fovea.run.fingerprint import GivenCode, check_unchanged, take_fingerprint
from fovea.run.folder import open_run_folder
from fovea.run.parity_faults import without_images
from fovea.run.sampling import answer_end_of
from fovea.run.signals import Stop, ending_signals
from fovea.run.unscored import record_unscored_answer
from fovea.run.warmup import WarmupStage
from fovea.train.start_check import Reference, Row, StartCheck
from fovea.wiring.backends import open_backends
from fovea.wiring.data import make_order, make_renderer, make_sources, within_epochs
from fovea.wiring.engine import make_evaluator
from fovea.wiring.environment import make_environment
from fovea.wiring.given import Frames, rows_as_files
from fovea.wiring.images import make_opener
from fovea.wiring.model import locate_model, open_vlm
from fovea.wiring.outputs import chosen_trackers, make_profile, make_trackers, model_table, peak_tflops
from fovea.wiring.tools import use_of_model, with_tools
from fovea.wiring.trial_score import remarks_on_answers, remarks_on_images, remarks_on_shares, try_reward
from fovea_gym.environments.access import GradedEnvironment
from fovea_gym.environments.base import Environment
from fovea_gym.environments.custom.signatures import RewardFunction
from fovea_gym.environments.mixture import with_shares
from fovea_gym.errors import ConfigError, DataError
from fovea_gym.rows.images import ImageOpener
from fovea_gym.rows.tasks import kinds_of
from fovea_gym.types import Task

ROWS_TRIED = 64
"""Number of training rows that are searched for rows with several images, with one and with none."""


def compare_with_transformers(
    config: Config,
    model: Model,
    processor: Processor,
    renderer: Renderer,
    opener: ImageOpener,
    environment: Environment,
    progress: Progress,
) -> None:
    """Compare the model with transformers on training rows, and print the result; ModelError if they differ."""
    progress.stage("comparing the model with transformers")
    rows = list(_rows(environment.tasks("train"), environment, renderer))
    if not any(map(images_of, rows)):
        raise ModelError(
            f"model.family=auto: none of the first {ROWS_TRIED} training rows has a usable image, and without one the "
            "model cannot be compared with transformers; correct the rows"
        )
    vlm = open_vlm(config, model, processor.banned_ids)
    assert isinstance(vlm, PlainVLM), "a model without a family has no fast path"
    reference = Reference(
        network=vlm.network, processor=processor.image_processor, arguments=layout_of(config_of(vlm.network)).arguments
    )
    largest = StartCheck(vlm.eval(), processor, renderer, opener, reference).run(rows)
    progress.print(
        f"model.family=auto: ids, tensors and log-probs of {len(rows)} rows equal those of transformers' processor and "
        f"forward (largest difference of a log-prob {largest:.1g})"
    )


def _rows(tasks: Sequence[Task], environment: Environment, renderer: Renderer) -> Iterator[Row]:
    """Yield a usable row for each number of images up to two, and the first row also without its images."""
    found = set[int]()
    for index in range(min(len(tasks), ROWS_TRIED)):
        try:
            row = environment.prompt(tasks[index])
            renderer.prompt(row)
        except DataError:
            continue  # the run reports the row when its data order reaches it
        for each in (row, *([] if found else [without_images(row)])):
            if (count := min(len(images_of(each)), 2)) not in found:
                found.add(count)
                yield each


def build(
    config: Config,
    environment: Environment | GradedEnvironment | None = None,
    frames: Frames | None = None,
    rewards: Sequence[RewardFunction] = (),
    tools: Sequence[object] = (),
) -> Run:
    """Make all services of a run, without training; each error says which setting to change.

    `frames` replaces the data files of the settings with rows in memory, such as `{"train": frame, "test": frame}`,
    which are written into the run folder. `environment` replaces the environment of the settings, for tasks that exist
    as Python objects (docs/own.md). `rewards` and `tools` are the objects for the settings `reward` and
    `environment.tools`.
    """
    started = perf_counter()
    chosen_trackers(config.log)  # fails first if a package is missing, before anything is made
    # a signal ends the block as an error does, so that no folder is left behind
    with rows_as_files(config, frames) as rows, ending_signals(Stop()), ExitStack() as on_failure:
        config = on_failure.enter_context(open_run_folder(rows.config))
        rows.move_into(Path(config.run_dir))
        graded = make_environment(config, environment, rewards, tools)
        user = environment.environment if isinstance(environment, GradedEnvironment) else environment
        run = _make_services(config, graded, started, GivenCode(environment=user, rewards=rewards, tools=tools))
        for remark in rows.remarks:
            run.progress.warn(remark)
        # from here on, the run is responsible for releasing its folder
        return replace(run, held=on_failure.pop_all())


def _make_services(config: Config, graded: GradedEnvironment, started: float, given: GivenCode) -> Run:
    folder = Path(config.run_dir)
    checkpoints = Checkpoints(folder, config.checkpoint.keep)
    resumed = _resumed(config, checkpoints)
    config = within_epochs(config, partial(graded.environment.tasks, "train"), resumed)
    start_step = resumed.step if resumed else 0
    progress = Progress(config.max_steps, start_step, config.log.progress, transcript=folder / CONSOLE_FILE)
    progress.print(f"run folder: {folder}")
    opener = make_opener(config.data, folder, progress.print)
    _print_remarks(config, graded, opener, progress, is_new=resumed is None)
    progress.stage("making the model" if config.model.tiny else "looking up the model")
    answer_end_of(config, graded.environment)  # fails before a model is loaded if the environment defines none
    model = locate_model(config, folder, lambda: graded.environment)
    processor = load_processor(model)
    renderer = make_renderer(config.model, processor, opener, max_new_tokens=config.rollout.max_new_tokens)
    make_use = partial(use_of_model, config, processor, renderer, opener, progress.warn)
    environment = with_tools(config, graded.environment, graded.tools, make_use)
    bad_rows = _bad_rows(folder, resumed, progress)
    sources = make_sources(config, in_one_turn(config, environment), renderer, bad_rows)
    progress.stage("taking the fingerprint of rows, code and model")
    fingerprint = take_fingerprint(config, model, sources.tasks, given)
    if resumed:
        allow = config.resume_changed == "allow"
        check_unchanged(resumed.state["fingerprint"], fingerprint, allow=allow, say=progress.print)
    # before the model is loaded: their errors should not cost minutes
    stream = _stream(config, graded, environment, sources.train)
    warmup = _warmup(config, environment, sources.train, renderer)
    profile = make_profile(config, folder, start_step, progress)
    metrics = _metrics_log(config, folder, resumed, progress, profile)
    if config.model.family == "auto":
        compare_with_transformers(config, model, processor, renderer, opener, environment, progress)
    progress.stage("loading the model")
    backends = open_backends(config, model, processor)
    progress.print(model_table(config.model.name, facts := backends.policy.describe()))
    for line in backends.kernel_notes:
        progress.print(line)
    if isinstance(backends.engine, PlainEngine):
        progress.print("model.fast_path: not used; trainer and engine run transformers' own forward, which is slow")
    return Run(
        config=config,
        folder=folder,
        environment=environment,
        sources=sources,
        stream=stream,
        engine=backends.engine,
        policy=backends.policy,
        weight_sync=backends.weight_sync,
        warmup=warmup,
        open_image=opener,
        evaluator=make_evaluator(
            config,
            environment,
            EngineAnswers(backends.engine, environment, graded.grading, config.rollout.max_episode_tokens),
            partial(record_unscored_answer, folder, progress.warn),
        ),
        checkpoints=checkpoints,
        resumed=resumed,
        fingerprint=fingerprint,
        metrics=metrics,
        findings_watch=FindingsWatch(read_metrics(folder)),
        phases=Phases(),
        progress=progress,
        started=started,
        peak_tflops=peak_tflops(config.log, facts, progress),
        token_text=renderer.token_text,
        image_token_id=processor.family.image_token_id,
        has_fast_path=processor.family.fast_path is not None,
        box_frame=processor.family.box_frame,
        profile=profile or nullcontext,
    )


def _stream(config: Config, graded: GradedEnvironment, environment: Environment, source: PromptSource) -> TaskStream:
    return TaskStream(
        source=source,
        order=make_order(config, source.tasks),
        curriculum=CurriculumProgress(graded.stages, config.curriculum),
        environment=environment,
        grading=graded.grading,
        max_episode_tokens=config.rollout.max_episode_tokens,
    )


def _warmup(config: Config, environment: Environment, train: PromptSource, renderer: Renderer) -> WarmupStage | None:
    """Make the warm-up; None if the settings have none."""
    settings = config.warmup
    if settings is None:
        return None
    unknown = set(settings.stop_kind_accuracy) - set(kinds_of(environment.tasks("dev")))
    if unknown:
        raise ConfigError(
            f"warmup.stop_kind_accuracy: no dev row is of kind {', '.join(sorted(unknown))}, so the warm-up could "
            f"never stop; the kinds are {', '.join(sorted(set(kinds_of(environment.tasks('dev')))))}"
        )
    return WarmupStage(
        settings=settings,
        # a separate data order, so that the rows of RL do not depend on how long the warm-up took
        order=Order(
            kinds_of(train.tasks),
            weights=with_shares(settings.kind_weights, train.tasks),
            seed=config.seed + 1,
            setting="warmup.kind_weights",
        ),
        source=train,
        environment=environment,
        answer_ids=renderer.demonstration,
    )


def _metrics_log(
    config: Config, folder: Path, resumed: SavedCheckpoint | None, progress: Progress, profile: Sink | None
) -> MetricsLog:
    """Make the log of a run's metrics; trackers connect here, before the model is loaded."""
    sinks: list[Sink] = [_metrics_file(folder, resumed, progress)]
    trackers = make_trackers(config, folder, resumed.step if resumed else 0, progress.warn)
    return MetricsLog([*sinks, profile] if profile else sinks, trackers)


def _metrics_file(folder: Path, resumed: SavedCheckpoint | None, progress: Progress) -> JsonlSink:
    """Open metrics.jsonl, with a warning if a run that resumes in its own folder finds it damaged."""
    sink = JsonlSink(folder, resume_step=resumed.step if resumed else 0)
    if resumed is None or not _is_of(folder, resumed):
        return sink
    if sink.num_lost:
        progress.warn(
            f"{folder / METRICS_FILE} has no metrics of {sink.num_lost} of the {resumed.step} steps before the "
            "checkpoint (lines are damaged or missing); curves have a gap there, but training is not affected"
        )
    elif sink.num_nuls:
        progress.warn(
            f"{folder / METRICS_FILE} ended in {sink.num_nuls} NUL bytes, as after a power failure; they are dropped, "
            "and no step before the checkpoint is lost; check whether other files on this disk are damaged"
        )
    return sink


def _bad_rows(folder: Path, resumed: SavedCheckpoint | None, progress: Progress) -> BadRows:
    """Load the known bad rows of a run, with a warning if a run that resumes in its own folder has lost some."""
    bad_rows = BadRows(folder, resume_at=resumed.state.get("bad_rows", 0) if resumed else 0)
    if resumed and bad_rows.num_lost and _is_of(folder, resumed):
        progress.warn(
            f"{folder / BAD_ROWS_FILE} lacks {bad_rows.num_lost} of the rows listed before the checkpoint (lines are "
            "damaged or missing, as after a power failure); they are listed again when they are found"
        )
    return bad_rows


def _is_of(folder: Path, checkpoint: SavedCheckpoint) -> bool:
    """True if a checkpoint belongs to the run in this folder, and not to another run."""
    return checkpoint.folder.resolve().is_relative_to(folder.resolve())


def _print_remarks(
    config: Config, graded: GradedEnvironment, opener: ImageOpener, progress: Progress, *, is_new: bool
) -> None:
    """Try the reward on a row, and warn of problems with the reward and the rows, also in the report."""
    remarks = try_reward(graded, opener)
    for line in remarks_on_images(graded.environment.tasks("train"), opener):
        progress.print(line)
    if is_new:
        Path(config.run_dir, HINTS_FILE).unlink(missing_ok=True)  # hints of an earlier start
    for remark in (*remarks, *remarks_on_answers(graded), *remarks_on_shares(config, graded)):
        progress.warn(remark)
        add_hint(Path(config.run_dir), remark)


def _resumed(config: Config, checkpoints: Checkpoints) -> SavedCheckpoint | None:
    if config.resume_from is not None:
        return checkpoints.resume_from(config.resume_from)
    return checkpoints.resume() if config.resume == "auto" else None
