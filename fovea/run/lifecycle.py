"""What happens around the steps: how a run begins, what it writes down after each, how it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from fovea.algorithms.kl import KlController
from fovea.config.run import Config
from fovea.environments.prompt_source import PromptSource
from fovea.errors import TrainError
from fovea.evaluation.answer import sampled_answer
from fovea.evaluation.controls import count_shared_images, usable_tasks, with_blank_images, with_shuffled_images
from fovea.metrics.log import peak_memory
from fovea.metrics.throughput import rates
from fovea.report.html import write_report
from fovea.report.samples import SampleRecord, png_bytes, write_samples
from fovea.report.summary import SUMMARY_FILE, Summary, controls_table, summary_table, write_summary
from fovea.run.context import Run
from fovea.run.parity import pass_parity_gate
from fovea.run.warmup import warm_up
from fovea.types import Evaluation, Group, Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a run is; part of every checkpoint."""

    kl_coef: float
    """Of the next step; with algorithm.kl_target it moves."""
    step: int = 0
    """RL steps taken."""
    before: Evaluation | None = None
    after_warmup: Evaluation | None = None
    warmup_seconds: float = 0.0
    rl_seconds: float = 0.0
    shared_images: int | None = None
    """Test rows whose image is in the training split; None: not counted."""
    started: float = field(default_factory=perf_counter)
    earlier_seconds: float = 0.0
    """Of the processes that the run has had before this one."""

    @property
    def total_seconds(self) -> float:
        return self.earlier_seconds + perf_counter() - self.started


def begin(run: Run) -> Standing:
    """Resume from the newest checkpoint, or evaluate, warm up and evaluate again; both through the parity gate."""
    if run.resumed is not None:
        run.policy.load(run.resumed.folder)
        run.order.restore(run.resumed.state["order"])
        run.curriculum.restore(run.resumed.state["curriculum"])
        run.order.weigh_levels(run.curriculum.level_weights)
        standing = _standing_from_json(run.resumed.step, run.resumed.state["standing"])
        standing = replace(standing, started=run.started)
        run.progress.print(f"resumed at step {standing.step} from {run.resumed.folder}")
        _say_what_a_new_end_changes(run, run.resumed.state["max_steps"])
        run.engine.load_weights(run.policy.weights(), version=standing.step)
        pass_parity_gate(run, version=standing.step)
        return standing
    run.engine.load_weights(run.policy.weights(), version=0)
    pass_parity_gate(run, version=0)
    run.progress.stage("looking for test images in the training split")
    standing = Standing(kl_coef=run.config.algorithm.kl_coef, started=run.started)
    # before the hours of training, not after them
    standing = replace(standing, shared_images=_count_shared(run))
    run.progress.stage("reading held-out accuracy before training")
    standing = replace(standing, before=evaluate_test(run, run.sources.test))
    if run.warmup is not None:
        standing = _warmed_up(run, standing)
    save_checkpoint(run, standing)
    return standing


def _say_what_a_new_end_changes(run: Run, max_steps_before: int) -> None:
    config = run.config
    if config.max_steps != max_steps_before and config.train.lr_schedule != "constant":
        run.progress.print(
            f"max_steps was {max_steps_before} and is {config.max_steps}: the {config.train.lr_schedule} schedule "
            "of the learning rate now ends there, so that the rate changes from here on"
        )


def _warmed_up(run: Run, standing: Standing) -> Standing:
    assert run.warmup is not None
    started = perf_counter()
    warm_up(run.warmup, lambda: _read_dev_of_warmup(run), run.progress.stage)
    seconds = perf_counter() - started
    run.policy.start_here()
    run.engine.load_weights(run.policy.weights(), version=0)
    run.progress.stage("reading held-out accuracy after the warm-up")
    return replace(standing, after_warmup=evaluate_test(run, run.sources.test), warmup_seconds=seconds)


def start_stage(run: Run, step: int) -> None:
    """The curriculum's stage of a step, said where it is another than before, and the rows that go with it."""
    change = run.curriculum.begin_step(step)
    if change is not None:
        run.progress.print(f"step {step}: {change}")
        run.order.weigh_levels(run.curriculum.level_weights)


def record(run: Run, standing: Standing, groups: Sequence[Group], metrics: Metrics) -> Standing:
    """Metrics, samples, dev readings and checkpoints of the step just taken."""
    seconds = run.phases.seconds()
    standing = replace(
        standing,
        step=standing.step + 1,
        rl_seconds=standing.rl_seconds + seconds["seconds/step"],
        kl_coef=_next_kl_coef(run.config, standing.kl_coef, metrics),
    )
    step, settings = standing.step, run.config
    metrics = metrics | seconds | run.phases.gib() | peak_memory()
    metrics |= rates(groups, metrics, run.peak_tflops)
    metrics |= run.curriculum.metrics()
    run.curriculum.end_step(metrics["reward"])
    metrics |= run.sources.bad_rows.metrics()
    if settings.evaluate.every_steps and step % settings.evaluate.every_steps == 0:
        metrics |= _dev_metrics(read_dev(run))
    run.metrics.write(step, metrics)
    run.progress.step(step, metrics)
    if step % settings.log.samples_every_steps == 0 or step == 1:
        write_samples(run.folder, step, _sample_records(run, groups))
    if settings.checkpoint.every_steps and step % settings.checkpoint.every_steps == 0:
        save_checkpoint(run, standing)
    return standing


def _next_kl_coef(config: Config, kl_coef: float, metrics: Metrics) -> float:
    """Moved towards algorithm.kl_target by the KL of the step; a step without one leaves it."""
    algorithm, rollout = config.algorithm, config.rollout
    kl = metrics.get("kl/reward", math.nan)
    if algorithm.kl_target is None or not math.isfinite(kl):
        return kl_coef
    controller = KlController(coef=kl_coef, target=algorithm.kl_target, horizon=algorithm.kl_horizon_samples)
    return controller.after(kl, rollout.prompts_per_step * rollout.samples_per_prompt).coef


def finish(run: Run, standing: Standing) -> Summary:
    """Final evaluation with its controls; checkpoint, summary.json, report.html and the table."""
    save_checkpoint(run, standing)
    run.progress.stage("reading held-out accuracy after RL")
    final = evaluate_test(run, run.sources.test)
    shuffled, blank = _evaluate_controls(run) if run.config.evaluate.image_controls else (None, None)
    summary = Summary(
        before=standing.before,
        warmup=standing.after_warmup,
        final=final,
        shuffled_images=shuffled,
        blank_images=blank,
        duplicates_across_splits=standing.shared_images,
        warmup_seconds=standing.warmup_seconds,
        rl_seconds=standing.rl_seconds,
        total_seconds=standing.total_seconds,
        steps=standing.step,
        seed=run.config.seed,
    )
    write_summary(run.folder / SUMMARY_FILE, summary)
    report = write_report(run.folder)
    for table in (summary_table(summary), controls_table(summary)):
        run.progress.print(table or "")
    run.progress.print(f"report: {report}")
    return summary


def evaluate_test(run: Run, source: PromptSource) -> Evaluation:
    return run.evaluator.evaluate(source, run.config.evaluate.test_size)


def _evaluate_controls(run: Run) -> tuple[Evaluation | None, Evaluation | None]:
    """The test questions with the images of others, and with grey ones; None where no row has an image to change."""
    source, size = run.sources.test, run.config.evaluate.test_size
    tasks = [task for task in usable_tasks(source, min(size or len(source), len(source))) if task.images]
    controls = (with_shuffled_images(tasks), with_blank_images(tasks, run.open_image))
    shuffled, blank = (run.evaluator.evaluate(source.with_tasks(x)) if x else None for x in controls)
    return shuffled, blank


def read_dev(run: Run) -> Evaluation:
    """Dev accuracy of the weights that the engine holds."""
    return run.evaluator.evaluate(run.sources.dev, run.config.evaluate.dev_size)


def _read_dev_of_warmup(run: Run) -> Evaluation:
    run.engine.load_weights(run.policy.weights(), version=0)
    return read_dev(run)


def save_checkpoint(run: Run, standing: Standing) -> None:
    """Everything that `begin` needs to go on as if never stopped."""
    state = {
        "order": run.order.state(),
        "curriculum": run.curriculum.state(),
        "standing": _standing_to_json(standing),
        "max_steps": run.config.max_steps,
        "bad_rows": len(run.sources.bad_rows),
    }
    run.checkpoints.save(standing.step, run.policy, state)


def _standing_to_json(standing: Standing) -> dict[str, Any]:
    return {
        "kl_coef": standing.kl_coef,
        "before": _evaluation_to_json(standing.before),
        "after_warmup": _evaluation_to_json(standing.after_warmup),
        "warmup_seconds": standing.warmup_seconds,
        "rl_seconds": standing.rl_seconds,
        "shared_images": standing.shared_images,
        "total_seconds": standing.total_seconds,
    }


def _standing_from_json(step: int, saved: Mapping[str, Any]) -> Standing:
    return Standing(
        step=step,
        kl_coef=saved["kl_coef"],
        before=_evaluation_from_json(saved["before"]),
        after_warmup=_evaluation_from_json(saved["after_warmup"]),
        warmup_seconds=saved["warmup_seconds"],
        rl_seconds=saved["rl_seconds"],
        shared_images=saved["shared_images"],
        earlier_seconds=saved["total_seconds"],
    )


def _evaluation_to_json(evaluation: Evaluation | None) -> dict[str, tuple[float, ...]] | None:
    return dict(evaluation.accuracies) if evaluation else None


def _evaluation_from_json(saved: Mapping[str, Sequence[float]] | None) -> Evaluation | None:
    return Evaluation(accuracies={kind: tuple(values) for kind, values in saved.items()}) if saved else None


def _dev_metrics(dev: Evaluation) -> Metrics:
    by_kind = {f"accuracy/dev/{kind}": sum(x) / len(x) for kind, x in dev.accuracies.items()}
    readings = {"accuracy/dev": dev.accuracy} | (by_kind if len(by_kind) > 1 else {})
    return readings | ({"accuracy/dev_unscored": float(dev.num_unscored)} if dev.num_unscored else {})


def _count_shared(run: Run) -> int | None:
    """Test rows whose image is in the training split; TrainError when the config forbids any."""
    if run.config.evaluate.shared_images == "ignore":
        return None
    shared = count_shared_images(run.sources.test, run.sources.train, run.open_image)
    if shared and run.config.evaluate.shared_images == "forbid":
        raise TrainError(
            f"{shared} held-out images are also in the training split, so that the accuracy is not held-out; "
            "split the rows by image, or set evaluate.shared_images=count"
        )
    return shared


def _sample_records(run: Run, groups: Sequence[Group]) -> list[SampleRecord]:
    settings = run.config.log
    return [_sample_record(run, group, settings.samples_answers) for group in groups[: settings.samples_prompts]]


def _sample_record(run: Run, group: Group, num_answers: int) -> SampleRecord:
    task = group.episodes[0].task
    return SampleRecord(
        prompt=task.question,
        truth=task.answer,
        kind=task.kind,
        images=tuple(png_bytes(run.open_image(ref)) for ref in task.images),
        answers=tuple(map(sampled_answer, group.episodes[:num_answers])),
    )
