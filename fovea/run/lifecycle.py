"""The lifecycle of a run around its steps: start or resume, records after each step, and the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from fovea.algorithms.kl import next_kl_coef
from fovea.config.algorithm_parts import KlInReward
from fovea.config.run import Config
from fovea.data.pixel_hashes import pixel_hashes
from fovea.errors import ParityError, TrainError
from fovea.evaluation.answers_file import write_answers
from fovea.evaluation.controls import usable_tasks, with_blank_images, with_shuffled_images
from fovea.evaluation.figures import dev_metrics
from fovea.evaluation.shared_images import SharedImages, find_shared_images
from fovea.metrics.log import peak_memory
from fovea.metrics.throughput import rates
from fovea.report.about import write_versions
from fovea.report.html import write_report
from fovea.report.samples import sample_records, write_samples
from fovea.report.summary import SUMMARY_FILE, Summary, tables_of, write_summary
from fovea.run.context import Run
from fovea.run.fingerprint import library_versions
from fovea.run.parity import read_parity, summary_line, write_parity
from fovea.run.parity_reading import ParityReading, parity_failure
from fovea.run.rollout_step import cut_unscored, unscored_bytes
from fovea.run.run_dir import link_latest
from fovea.run.signal_watch import too_few_rows
from fovea.run.state import TrainState
from fovea.run.warmup import warm_up
from fovea.types import Evaluation, Group, Metrics


@asynccontextmanager
async def closing(run: Run) -> AsyncIterator[None]:
    """Close the services and files of a run on every way out."""
    async with AsyncExitStack() as stack:
        # closed in the opposite order, each of them whatever becomes of the others
        stack.enter_context(run.held)
        stack.callback(run.stream.grading.close)
        stack.push_async_callback(run.policy.close)
        stack.push_async_callback(run.engine.close)
        stack.enter_context(run.metrics)
        stack.enter_context(run.progress)
        yield


async def begin(run: Run) -> TrainState:
    """Resume from the newest checkpoint, or evaluate, warm up and evaluate again; both go through the parity gate."""
    write_versions(run.folder, library_versions(run.fingerprint))
    if warning := too_few_rows(len(run.sources.train), run.config.rollout):
        run.progress.print(warning)
    state = await (_begun(run) if run.resumed is None else _resumed(run))
    link_latest(run.folder)
    return state


async def _begun(run: Run) -> TrainState:
    await run.weight_sync.push(0)
    await pass_parity_gate(run, version=0)
    # a forbidden overlap of the splits should fail before the hours of training, not after them
    kl = run.config.algorithm.kl
    state = TrainState(
        kl_coef=0.0 if kl is None else kl.coef, started=run.started, shared_images=_search_shared_images(run)
    )
    if run.config.evaluate.before_training:
        run.progress.stage("evaluating on the test rows before training")
        state = replace(state, before=await evaluate_test(run, "before"))
    if run.warmup is not None:
        state = await _warmed_up(run, state)
    await save_checkpoint(run, state)
    return state


async def _resumed(run: Run) -> TrainState:
    assert run.resumed is not None
    saved, stream = run.resumed.state, run.stream
    cut_unscored(run.folder, saved["unscored_bytes"])
    await run.policy.load(run.resumed.folder)
    stream.order.restore(saved["order"])
    stream.curriculum.restore(saved["curriculum"])
    stream.order.weigh_levels(stream.curriculum.level_weights)
    state = TrainState.from_json(run.resumed.step, saved["train_state"], started=run.started)
    for damaged in run.resumed.passed_over:
        run.progress.print(f"{damaged} is damaged: it is passed over, and kept as {damaged.name}.damaged")
    run.progress.print(f"resumed at step {state.step} from {run.resumed.folder}")
    _report_changed_pace(run, saved["pace"])
    await run.weight_sync.push(state.step)
    await pass_parity_gate(run, version=state.step)
    return state


def _pace(config: Config) -> dict[str, Any]:
    """The settings that a resumed run may have changed and that change its figures from there on, by their keys."""
    train, critic = config.train, config.algorithm.critic
    keys = ("learning_rate", "max_grad_norm", "weight_decay", "lr_warmup_steps", "lr_schedule", "final_lr_frac")
    pace = {f"train.{key}": getattr(train, key) for key in keys}
    if critic is not None:
        pace["algorithm.advantage.critic.learning_rate"] = critic.learning_rate
    if train.lr_schedule != "constant":
        # where the schedule of the learning rate ends
        pace["max_steps"] = config.max_steps
    return pace


def _report_changed_pace(run: Run, before: Mapping[str, Any]) -> None:
    for key, value in _pace(run.config).items():
        if key in before and before[key] != value:
            run.progress.print(f"{key} was {before[key]} and is {value} from here on")


async def pass_parity_gate(run: Run, version: int) -> None:
    """Measure parity, write parity.json and print one line; ParityError beyond the limit."""
    if run.config.parity.prompts == 0:
        return
    run.progress.stage("comparing the log-probs of engine and trainer")
    reading = await gate_reading(run)
    write_parity(run.folder, reading, version)
    run.progress.print(summary_line(reading))
    # a push frees the activations that the engine recorded of these completions
    await run.weight_sync.push(version)
    if not reading.passed:
        raise ParityError(parity_failure(reading))


async def measure_parity(run: Run) -> ParityReading:
    """Measure the parity of a run that was built for this alone, and close it."""
    async with closing(run):
        await run.weight_sync.push(0)
        return await gate_reading(run)


async def gate_reading(run: Run) -> ParityReading:
    """Compare log-probs of engine and trainer on the same tokens, at their current weights."""
    return await read_parity(
        run.config,
        run.engine,
        run.policy,
        run.sources.train,
        run.environment,
        token_text=run.token_text,
        say=run.progress.stage,
    )


async def _warmed_up(run: Run, state: TrainState) -> TrainState:
    assert run.warmup is not None
    started = perf_counter()

    async def read_dev_of_warmup() -> Evaluation:
        await run.weight_sync.push(0)
        return await read_dev(run, "warmup")

    await warm_up(run.warmup, run.policy, read_dev_of_warmup, run.progress.stage)
    seconds = perf_counter() - started
    await run.policy.snapshot_reference()
    await run.weight_sync.push(0)
    state = replace(state, warmup_seconds=seconds)
    if not run.config.evaluate.before_training:
        return state
    run.progress.stage("evaluating on the test rows after the warm-up")
    return replace(state, after_warmup=await evaluate_test(run, "after-warmup"))


def begin_stage(run: Run, step: int) -> None:
    """Enter the curriculum stage of this step; print a new stage, and apply its level weights to the data order."""
    change = run.stream.curriculum.begin_step(step)
    if change is not None:
        run.progress.print(f"step {step}: {change}")
        run.stream.order.weigh_levels(run.stream.curriculum.level_weights)


async def record(run: Run, state: TrainState, groups: Sequence[Group], metrics: Metrics) -> TrainState:
    """Write metrics, samples, dev accuracy and checkpoint of the step just taken; returns the next state."""
    seconds = run.phases.seconds()
    state = replace(
        state,
        step=state.step + 1,
        rl_seconds=state.rl_seconds + seconds["seconds/step"],
        kl_coef=_next_kl_coef(run.config, state.kl_coef, metrics),
    )
    step, settings = state.step, run.config
    metrics = metrics | seconds | run.phases.gib() | peak_memory()
    metrics |= rates(groups, metrics, run.peak_tflops)
    metrics |= run.stream.curriculum.metrics()
    run.stream.curriculum.end_step(metrics["reward"])
    metrics |= run.sources.bad_rows.metrics()
    if settings.evaluate.every_steps and step % settings.evaluate.every_steps == 0:
        metrics |= dev_metrics(await read_dev(run, f"step-{step:06d}"))
    state = replace(state, kept=state.kept.after_step(step, metrics, keep_best=settings.checkpoint.keep_best))
    run.metrics.write(step, metrics)
    run.progress.step(step, metrics)
    if state.kept.skipped_since == step:
        run.progress.print(
            f"step {step}: the update was skipped, since something in it is not finite; the checkpoint before it, "
            f"{run.checkpoints.newest}, is kept: to go back there, delete the later ones and set resume=auto"
        )
    if hint := run.signal_watch.hint(metrics, settings.rollout):
        run.progress.print(hint)
    if step % settings.log.samples_every_steps == 0 or step == 1:
        write_samples(run.folder, step, sample_records(groups, run.open_image))
    every_steps = settings.checkpoint.every_steps
    if (every_steps and step % every_steps == 0) or state.kept.best_step == step:
        await save_checkpoint(run, state)
    return state


def _next_kl_coef(config: Config, kl_coef: float, metrics: Metrics) -> float:
    kl, rollout = config.algorithm.kl, config.rollout
    if not isinstance(kl, KlInReward) or kl.controller is None:
        return kl_coef
    return next_kl_coef(
        kl_coef,
        metrics.get("kl/reward"),
        target=kl.controller.target,
        horizon_samples=kl.controller.horizon_samples,
        num_samples=rollout.prompts_per_step * rollout.samples_per_prompt,
    )


async def finish(run: Run, state: TrainState) -> Summary:
    """End a run: last checkpoint, test evaluation with image ablations, summary.json, report.html, printed tables."""
    await save_checkpoint(run, state)
    run.progress.stage("evaluating on the test rows after RL")
    final = await evaluate_test(run, "final")
    shuffled, blank = await _evaluate_controls(run) if run.config.evaluate.image_controls else (None, None)
    summary = Summary(
        before=state.before,
        warmup=state.after_warmup,
        final=final,
        shuffled_images=shuffled,
        blank_images=blank,
        duplicates_across_splits=None if state.shared_images is None else state.shared_images.shared,
        duplicates_searched_frac=None if state.shared_images is None else state.shared_images.train.share,
        warmup_seconds=state.warmup_seconds,
        rl_seconds=state.rl_seconds,
        total_seconds=state.total_seconds,
        steps=state.step,
        seed=run.config.seed,
    )
    write_summary(run.folder / SUMMARY_FILE, summary)
    report = write_report(run.folder)
    for table in tables_of(summary):
        run.progress.print(table)
    run.progress.print(f"report: {report}")
    return summary


async def evaluate_test(run: Run, when: str) -> Evaluation:
    """Evaluate the engine's weights on test rows; the answers are kept as answers/test-WHEN.jsonl."""
    keep = partial(write_answers, run.folder, f"test-{when}")
    return await run.evaluator.evaluate(run.sources.test, run.config.evaluate.test_size, keep)


async def _evaluate_controls(run: Run) -> tuple[Evaluation | None, Evaluation | None]:
    """Image ablations: evaluate on test rows with shuffled and with blank images; None where no row has an image."""
    source, size = run.sources.test, run.config.evaluate.test_size
    tasks = [task for task in usable_tasks(source, min(size or len(source), len(source))) if task.images]
    controls = (with_shuffled_images(tasks), with_blank_images(tasks, run.open_image))
    shuffled, blank = [await run.evaluator.evaluate(source.with_tasks(x)) if x else None for x in controls]
    return shuffled, blank


async def read_dev(run: Run, when: str) -> Evaluation:
    """Evaluate the engine's weights on dev rows; the answers are kept as answers/dev-WHEN.jsonl."""
    keep = partial(write_answers, run.folder, f"dev-{when}")
    return await run.evaluator.evaluate(run.sources.dev, run.config.evaluate.dev_size, keep)


async def save_checkpoint(run: Run, state: TrainState) -> None:
    """Write a checkpoint from which `begin` resumes exactly."""
    saved = {
        "order": run.stream.order.state(),
        "curriculum": run.stream.curriculum.state(),
        "train_state": state.to_json(),
        "pace": _pace(run.config),
        "bad_rows": len(run.sources.bad_rows),
        "fingerprint": run.fingerprint,
        "unscored_bytes": unscored_bytes(run.folder),
    }
    await run.checkpoints.save(state.step, run.policy, saved, state.kept)


async def save_and_say(run: Run, state: TrainState) -> None:
    """Write a checkpoint for a run that is about to end, and print where it can go on."""
    await save_checkpoint(run, state)
    run.progress.print(f"saved at step {state.step}; run_dir={run.folder} resume=auto goes on from here")


def _search_shared_images(run: Run) -> SharedImages | None:
    """Look for test images in the training split; TrainError where there is one and the settings forbid it."""
    settings, data = run.config.evaluate, run.config.data
    if settings.shared_images == "ignore":
        return None
    folder, salt = Path(data.cache_dir).expanduser(), " ".join(data.convert_images)
    with pixel_hashes(folder, run.open_image, salt) as pixel_hash:
        found = find_shared_images(
            run.sources.test,
            run.sources.train,
            pixel_hash,
            sample_rows=settings.shared_images_rows,
            say=run.progress.stage,
        )
    run.progress.print(str(found))
    if found.shared and settings.shared_images == "forbid":
        raise TrainError(
            f"{found.shared} held-out images are also in the training split, so that the accuracy is not held-out; "
            "split the rows by image, or set evaluate.shared_images=count"
        )
    return found
