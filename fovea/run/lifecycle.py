"""The parts of a run around its steps, in order.

`begin` starts or resumes a run, `record` writes and saves the result of a step, `end_early` and `finish` end the run,
and `closing` closes its services however it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from time import perf_counter
from typing import Any, NoReturn

from fovea.algorithms.kl import next_kl_coef
from fovea.config.algorithm import KlInReward
from fovea.config.run import Config
from fovea.errors import TrainError
from fovea.evaluation.statistics import dev_metrics
from fovea.metrics.log import peak_rss_gib
from fovea.metrics.throughput import rates
from fovea.report.about import SUMMARY_FILE, add_hint, read_hints, write_versions
from fovea.report.export import write_report
from fovea.report.samples import drop_samples
from fovea.report.summary import Summary, write_summary
from fovea.report.tables import tables_of
from fovea.report.viewed_run import ViewedRun
from fovea.run.callbacks import StepRecord
from fovea.run.context import Run
from fovea.run.fingerprint import library_versions
from fovea.run.held_out import evaluate_controls, evaluate_test, read_dev, sample_dev, search_shared_images
from fovea.run.microbatches import MicrobatchTokens, leaving_limit, left_limit
from fovea.run.parity import check_sync, pass_parity_gate, read_parity
from fovea.run.parity_result import ParityResult
from fovea.run.run_dir import link_latest
from fovea.run.signals import Stop, ending_signals, too_few_rows
from fovea.run.state import TrainState, position_of, restore_position
from fovea.run.unscored import UNSCORED_FILE, cut_unscored, record_unscored_answer, unscored_bytes, unscored_hint
from fovea.run.warmup import warm_up
from fovea.types import Evaluation, Group, Metrics
from fovea.weights.base import SyncReport
from fovea_gym.errors import FoveaError

ENDING_SECONDS = 30.0
"""Longest wait for the checkpoint that is being written when an error ends a run."""


async def begin(run: Run) -> TrainState:
    """Resume from the newest checkpoint, or evaluate, warm up and evaluate again; the parity gate runs either way."""
    write_versions(run.folder, library_versions(run.fingerprint))
    if warning := too_few_rows(len(run.sources.train), run.config):
        run.progress.print(warning)
        add_hint(run.folder, warning)
    state = await (_begun(run) if run.resumed is None else _resumed(run))
    link_latest(run.folder)
    return state


async def _begun(run: Run) -> TrainState:
    await _limit_microbatches(run, None)
    await run.weight_sync.sync(0)
    await pass_parity_gate(run, version=0)
    # a forbidden overlap of the splits should fail before hours of training, not after them
    kl = run.config.algorithm.kl
    state = TrainState(
        kl_coef=0.0 if kl is None else kl.coef, started=run.started, shared_images=search_shared_images(run)
    )
    if run.config.evaluate.before_training:
        run.progress.stage("evaluating on the test rows before training")
        state = replace(state, before=await evaluate_test(run, "before", 0))
    if run.warmup is not None:
        state = await _warmed_up(run, state)
    await save_checkpoint(run, state)
    return state


async def _resumed(run: Run) -> TrainState:
    assert run.resumed is not None
    saved = run.resumed.state
    cut_unscored(run.folder, saved["unscored_bytes"])
    drop_samples(run.folder, after=run.resumed.step)
    # written by an earlier end of the run, which now continues from there or from an earlier step
    (run.folder / SUMMARY_FILE).unlink(missing_ok=True)
    # absolute, since workers of a Ray cluster have a different working directory
    await run.policy.load(run.resumed.folder.absolute())
    restore_position(run, saved)
    state = TrainState.from_json(run.resumed.step, saved["train_state"], started=run.started)
    for damaged in run.resumed.passed_over:
        run.progress.warn(f"{damaged} is damaged: it is skipped, and kept as {damaged.name}.damaged")
    run.progress.print(f"resumed at step {state.step} from {run.resumed.folder}")
    for key, value in _pace(run.config).items():
        if key in saved["pace"] and saved["pace"][key] != value:
            run.progress.print(f"{key} was {saved['pace'][key]} and is {value} from here on")
    await _limit_microbatches(run, state.microbatches)
    await run.weight_sync.sync(state.step)
    await pass_parity_gate(run, version=state.step)
    # saves into this folder if the checkpoint came from another run
    await save_checkpoint(run, state)
    return state


async def _limit_microbatches(run: Run, saved: MicrobatchTokens | None) -> None:
    """Begin with the micro-batch size that fitted the memory in an earlier process of this run."""
    setting, left = run.config.train.max_tokens_per_microbatch, left_limit(run.folder)
    known = [each.limit for each in (saved, left) if each is not None and each.setting == setting]
    limit = min(known, default=setting)
    # a limit equal to the setting was left by a rank whose memory ran out while its engine held memory too
    if limit < setting or (left is not None and left.setting == setting):
        await run.policy.limit_microbatches(limit)
        if limit < setting:
            run.progress.print(
                f"micro-batches have {limit} tokens at most, since memory ran out before this resume; set "
                f"train.max_tokens_per_microbatch={setting} to another value to replace this limit"
            )
        if run.config.rollout.engine.shares_weights:
            run.progress.print("the KV cache is freed before every update, since memory ran out before this resume")


async def _warmed_up(run: Run, state: TrainState) -> TrainState:
    assert run.warmup is not None
    started = perf_counter()

    async def read_dev_of_warmup() -> Evaluation:
        await _wake_with_weights(run)
        reading = await read_dev(run, "warmup", 0)
        await run.engine.sleep()
        return reading

    failed = list[str]()

    def note_failed(reason: str) -> None:
        failed.append(reason)
        record_unscored_answer(run.folder, run.progress.warn, reason)

    await run.engine.sleep()
    await warm_up(run.warmup, run.policy, read_dev_of_warmup, run.progress.stage, note_failed)
    if failed:
        run.progress.warn(f"warm-up: {len(failed)} demonstrations failed and were left out; see {UNSCORED_FILE}")
    seconds = perf_counter() - started
    await run.policy.snapshot_reference()
    await check_sync(run, await _wake_with_weights(run))
    state = replace(state, warmup_seconds=seconds)
    if not run.config.evaluate.before_training:
        return state
    run.progress.stage("evaluating on the test rows after the warm-up")
    return replace(state, after_warmup=await evaluate_test(run, "after-warmup", 0))


async def _wake_with_weights(run: Run) -> SyncReport:
    """Send the weights of the warm-up to the engine, which sleeps during updates, and wake it."""
    sync = await run.weight_sync.sync(0)
    await run.engine.wake()
    return sync


async def record(run: Run, state: TrainState, groups: Sequence[Group], metrics: Metrics) -> TrainState:
    """Write metrics, dev accuracy and checkpoint of the step that was just taken; returns the next state."""
    await run.checkpoints.check()
    seconds, setting = run.phases.seconds(), run.config.train.max_tokens_per_microbatch
    state = replace(
        state,
        step=state.step + 1,
        rl_seconds=state.rl_seconds + seconds["seconds/step"],
        kl_coef=_next_kl_coef(run.config, state.kl_coef, metrics),
        microbatches=MicrobatchTokens(setting=setting, limit=int(metrics.get("microbatch/max_tokens", setting))),
    )
    step, settings = state.step, run.config
    metrics = metrics | seconds | run.phases.gib() | run.phases.waits()
    metrics |= {"memory/peak_rss_gib": peak_rss_gib()} | run.checkpoints.metrics()
    metrics |= rates(groups, metrics, run.peak_tflops)
    if settings.evaluate.every_steps and step % settings.evaluate.every_steps == 0:
        metrics |= dev_metrics(await read_dev(run, f"step-{step:06d}", step)) | await sample_dev(run)
    state = replace(state, retained=state.retained.after_step(step, metrics, keep_best=settings.checkpoint.keep_best))
    run.metrics.write(step, metrics)
    run.progress.step(step, metrics)
    await _print_notes(run, state, metrics)
    every_steps = settings.checkpoint.every_steps
    if (every_steps and step % every_steps == 0) or state.retained.best_step == step:
        await save_checkpoint(run, state)
    run.callbacks.stepped(StepRecord(step=step, max_steps=settings.max_steps, metrics=metrics, folder=run.folder))
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


async def _print_notes(run: Run, state: TrainState, metrics: Metrics) -> None:
    """Print events of a step that the user may want to act on, such as a skipped update or a lost engine."""
    step, settings = state.step, run.config
    if state.retained.skipped_since == step:
        await run.checkpoints.finish()
        run.progress.warn(
            f"step {step}: the update was skipped, since it has values that are not finite; the checkpoint before it, "
            f"{run.checkpoints.newest}, is kept: to go back to it, delete the later ones and set resume=auto"
        )
    if metrics.get("microbatch/out_of_memory"):
        run.progress.warn(
            f"step {step}: memory ran out in the update, which was repeated with smaller micro-batches, "
            f"of {metrics['microbatch/max_tokens']:.0f} tokens at most from here on, in place of "
            f"train.max_tokens_per_microbatch={settings.train.max_tokens_per_microbatch}"
        )
    if lost := metrics.get("transfer/engines_lost"):
        run.progress.warn(
            f"step {step}: engines whose process ended or hung: {lost:.0f}; the run continues more slowly with the "
            "others; stop it and set resume=auto to start all engines again"
        )
    for finding in run.findings_watch.new(step, metrics, settings.model_dump(mode="json")):
        run.progress.print(f"step {step}: {finding.text}")


async def save_checkpoint(run: Run, state: TrainState) -> None:
    """Save a checkpoint from which `begin` resumes exactly; it is written in the background."""
    saved = {
        **position_of(run),
        "train_state": state.to_json(),
        "pace": _pace(run.config),
        "fingerprint": run.fingerprint,
        "unscored_bytes": unscored_bytes(run.folder),
    }
    with run.phases("checkpoint"):
        await run.checkpoints.save(state.step, run.policy, saved, state.retained)
        if not run.config.checkpoint.background:
            await run.checkpoints.finish()


def _pace(config: Config) -> dict[str, Any]:
    """Settings, by key, that may change on resume and then affect the results of the run."""
    train, critic = config.train, config.algorithm.critic
    rates = ("learning_rate", "vision_tower_learning_rate", "projector_learning_rate")
    keys = (*rates, "max_grad_norm", "weight_decay", "lr_warmup_steps", "lr_schedule", "final_lr_frac")
    pace = {f"train.{key}": getattr(train, key) for key in keys}
    if critic is not None:
        pace["algorithm.advantage.critic.learning_rate"] = critic.learning_rate
    if train.lr_schedule != "constant":
        # the step at which the learning-rate schedule ends
        pace["max_steps"] = config.max_steps
    return pace


@asynccontextmanager
async def closing(run: Run) -> AsyncIterator[None]:
    """Close the services and files of a run at the end of the block, however it ends."""
    async with AsyncExitStack() as stack:
        # closed in reverse order, each one even if closing another fails
        stack.enter_context(run.held)
        stack.callback(run.stream.grading.close)
        stack.push_async_callback(run.policy.close)
        stack.push_async_callback(run.engine.close)
        stack.enter_context(run.metrics)
        stack.enter_context(run.progress)
        try:
            with leaving_limit(run.folder, run.config.train.max_tokens_per_microbatch):
                yield
        except Exception:
            # an error ends the run even if the last checkpoint cannot be finished: a worker that waits in a collective
            # call, which the others have left, would never report its part as written
            with suppress(FoveaError, TimeoutError):
                async with asyncio.timeout(ENDING_SECONDS):
                    await run.checkpoints.finish()
            raise
        await run.checkpoints.finish()


def stopping(run: Run) -> AbstractContextManager[Stop]:
    """Handle the signals that end a run, and its time limit, within the block."""
    return ending_signals(Stop(run.config.max_hours, run.started - run.spent_seconds))


async def end_early(run: Run, state: TrainState, stop: Stop) -> NoReturn:
    """Save a run that a signal or its time limit ends, print how to resume it, and end it.

    If the time limit ends it, `evaluate.after_max_hours` evaluates it first.
    """
    reason = stop.reason
    await save_last(run, state)
    _print_hints(run)
    run.progress.print(f"{reason}: saved at step {state.step}; run_dir={run.folder} resume=auto continues from here")
    if stop.received is None and run.config.evaluate.after_max_hours:
        with stop.at_once():
            # the asynchronous loop may have dropped its rollouts before it sent these weights to the engines
            await run.weight_sync.sync(state.step)
            await finish(run, state)
    stop.end()


async def save_last(run: Run, state: TrainState) -> None:
    """Write the last checkpoint of this process, and wait until it is complete."""
    await save_checkpoint(run, state)
    await run.checkpoints.finish()


async def finish(run: Run, state: TrainState) -> Summary:
    """End a saved run: test evaluation with image ablations, summary.json, report.html, printed tables.

    TrainError if every update was skipped, so that the run learned nothing.
    """
    if state.retained.skipped_since == 1:
        raise TrainError(
            f"all {state.step} updates were skipped, since a loss, a log-prob or a gradient was not finite, so the "
            "weights are those of the start; lower train.learning_rate and the coefficients of the loss, or look for "
            "non-finite values in the model and the rewards, and start again in another run_dir"
        )
    run.progress.stage("evaluating on the test rows after RL")
    final = await evaluate_test(run, "final", state.step)
    shuffled, blank = await evaluate_controls(run) if run.config.evaluate.image_controls else (None, None)
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
    if hint := unscored_hint(run.folder):
        add_hint(run.folder, hint)
    report = write_report(run.folder)
    for table in tables_of(summary):
        run.progress.print(table)
    _print_hints(run)
    run.progress.print(f"report: {report}")
    return summary


def _print_hints(run: Run) -> None:
    """Print all hints of the run again at its end, with findings such as a collapse or a lack of progress."""
    for hint in [*read_hints(run.folder), *(finding.text for finding in ViewedRun(run.folder).findings())]:
        run.progress.print(hint)


async def measure_parity(run: Run) -> ParityResult:
    """Measure the parity of a run that was built only for this, and close the run."""
    async with closing(run):
        await run.weight_sync.sync(0)
        return await read_parity(run, 0)
