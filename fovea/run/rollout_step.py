"""The rollout of a step, from rows to scored groups: one batch, or with dynamic sampling as many as fill the step."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fovea.config.run import Config
from fovea.environments.answer_end import declared_end
from fovea.environments.base import Environment, OpensSessions
from fovea.errors import ConfigError, TrainError
from fovea.metrics.log import Phases
from fovea.rollout.base import CountsPrefill, Engine
from fovea.rollout.collect import collect
from fovea.rollout.conversation import SessionLog
from fovea.run.context import Run, TaskStream
from fovea.run.views import view_metrics, with_views
from fovea.types import AnswerEnd, Group, Metrics, Sampling
from fovea.utils.bounded import append_to, read_lines

SAME_ACCURACY = 1e-6
"""Accuracies of a group within this range count as equal."""
UNSCORED_FILE = "unscored.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollout:
    """Scored groups of one step."""

    groups: Sequence[Group]
    """All scored groups."""
    to_train: Sequence[Group]
    """Groups that the step trains on."""
    dropped: Sequence[Group]
    """Groups left out by dynamic sampling."""
    unscored: Sequence[str] = ()
    """The reason for each group that was left out because it has no score."""
    failed: Sequence[str] = ()
    """The reason for each episode that was left out because its session failed."""
    metrics: Metrics

    @property
    def reward(self) -> float:
        """Mean reward of all episodes; there must be one."""
        rewards = [episode.score.reward for group in self.groups for episode in group.episodes]
        return sum(rewards) / len(rewards)


async def draw(run: Run, step: int, phases: Phases) -> StepRollout:
    """Roll out a step in its curriculum stage; its rewards count for the stage of the next one.

    Rollouts are drawn in the order of their steps, one after another.
    """
    _begin_stage(run, step)
    _prefill_metrics(run.engine)  # those of an evaluation
    rollout = await roll_out(run.engine, run.stream, run.config, step=step, phases=phases)
    curriculum = run.stream.curriculum
    metrics = rollout.metrics | curriculum.metrics() | run.sources.bad_rows.metrics()
    metrics |= _prefill_metrics(run.engine)
    if rollout.groups:
        curriculum.end_step(rollout.reward)
    return replace(rollout, metrics=metrics)


def _prefill_metrics(engine: Engine) -> Metrics:
    return engine.prefill_metrics() if isinstance(engine, CountsPrefill) else {}


def _begin_stage(run: Run, step: int) -> None:
    """Enter the curriculum stage of this step; print a new stage, and apply its level weights to the data order."""
    change = run.stream.curriculum.begin_step(step)
    if change is not None:
        run.progress.print(f"step {step}: {change}")
        run.stream.order.weigh_levels(run.stream.curriculum.level_weights)


async def roll_out(engine: Engine, stream: TaskStream, config: Config, *, step: int, phases: Phases) -> StepRollout:
    """Roll out `prompts_per_step` groups; with dynamic sampling that many of mixed accuracy, within `max_gen_batches`.

    Yu et al., DAPO, arXiv 2503.14476, section 3.2, by accuracy instead of reward.
    """
    sessions = SessionLog()
    rollout = await _roll_out(_Batches(engine=engine, stream=stream, config=config, sessions=sessions), step, phases)
    unscored, metrics = rollout.unscored, dict(rollout.metrics)
    if config.rollout.views:
        metrics |= view_metrics(rollout.groups, config.rollout.views, step, config.max_steps)
    has_sessions = isinstance(stream.environment, OpensSessions)
    if stream.grading.waits or has_sessions:
        metrics["groups/unscored"] = float(len(unscored))
    if has_sessions:
        metrics |= sessions.metrics()
    failed = tuple(str(failure) for failure in sessions.failures if failure.reward is None)
    return replace(rollout, failed=failed, metrics=metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batches:
    """The batches of groups that a step may draw."""

    engine: Engine
    stream: TaskStream
    config: Config
    sessions: SessionLog

    async def draw(self, step: int, num_before: int, phases: Phases) -> tuple[list[Group], list[str]]:
        """The scored groups of one batch, and the reasons of those that were left out."""
        rollout, unscored = self.config.rollout, list[str]()
        with phases("data"):
            prompted = self.stream.source.take(self.stream.order, rollout.prompts_per_step)
            if rollout.views or self.config.algorithm.views:
                prompted = with_views(self.stream.source, prompted, self.config, step=step, num_before=num_before)
        with phases("rollout"):
            groups = await collect(
                self.engine,
                self.stream.interaction,
                prompted,
                sampling=training_sampling(self.config, self.stream.environment),
                n=rollout.samples_per_prompt,
                seed=(self.config.seed, step),
                num_before=num_before,
                unscored=unscored,
                sessions=self.sessions,
                fewest=2 if self.config.algorithm.compares else 1,
                for_update=True,
                num_noisy=0 if rollout.views is None else rollout.views.num_drawn(rollout.samples_per_prompt),
            )
        return groups, unscored


async def _roll_out(batches: _Batches, step: int, phases: Phases) -> StepRollout:
    stream, wanted = batches.stream, batches.config.rollout.prompts_per_step
    groups, unscored = await batches.draw(step, 0, phases)
    dynamic = batches.config.algorithm.dynamic_sampling
    if dynamic is None:
        return StepRollout(groups=groups, to_train=groups, dropped=(), unscored=unscored, metrics={})
    num_batches = 1
    # by accuracy: a group whose rewards differ by a small part for the format only has nothing to teach
    mixed, alike = _split_by_signal(groups)
    while len(mixed) < wanted and num_batches < dynamic.max_gen_batches and stream.has_more:
        more, more_unscored = await batches.draw(step, num_batches * wanted, phases)
        more_mixed, more_alike = _split_by_signal(more)
        groups, unscored = [*groups, *more], [*unscored, *more_unscored]
        mixed, alike = mixed + more_mixed, alike + more_alike
        num_batches += 1
    to_train = mixed[:wanted]
    return StepRollout(
        groups=groups,
        to_train=to_train,
        dropped=alike + mixed[wanted:],
        unscored=unscored,
        metrics={
            "dynamic_sampling/batches": float(num_batches),
            "dynamic_sampling/groups_dropped": float(len(alike)),
            "dynamic_sampling/groups_left_over": float(len(mixed) - len(to_train)),
            "dynamic_sampling/groups_missing": float(wanted - len(to_train)),
        },
    )


def _split_by_signal(groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
    """Split groups into those of mixed accuracy and those of equal accuracy."""
    return [group for group in groups if _differs(group)], [group for group in groups if not _differs(group)]


def _differs(group: Group) -> bool:
    accuracies = [episode.score.accuracy for episode in group.episodes]
    return max(accuracies) - min(accuracies) > SAME_ACCURACY


def record_unscored(folder: Path, warn: Callable[[str], None], step: int, rollout: StepRollout) -> None:
    """Append episodes and groups without a score to unscored.jsonl; TrainError when no group of the step has one."""
    _write_unscored(folder, warn, step, [*rollout.failed, *rollout.unscored])
    if not rollout.groups:
        raise TrainError(
            f"none of the {len(rollout.unscored)} groups of step {step} could be scored; the last: "
            f"{rollout.unscored[-1]}; fix that ({UNSCORED_FILE} of the run folder has them all) and continue "
            "with resume=auto"
        )


def record_unscored_answer(folder: Path, warn: Callable[[str], None], reason: str) -> None:
    """Append the reason why a held-out row has no score, or a demonstration failed, to unscored.jsonl."""
    _write_unscored(folder, warn, None, [reason])


def unscored_hint(folder: Path) -> str | None:
    """A line with the number of episodes, groups and held-out answers without a score; None where all have one."""
    file = folder / UNSCORED_FILE
    count = sum(1 for _ in read_lines(file, within=folder)) if file.exists() else 0
    if not count:
        return None
    return f"not scored and left out: {count:,} groups, episodes and held-out answers; {UNSCORED_FILE} has the reasons"


def unscored_bytes(folder: Path) -> int:
    """Length of unscored.jsonl, for a checkpoint."""
    file = folder / UNSCORED_FILE
    return file.stat().st_size if file.exists() else 0


def cut_unscored(folder: Path, num_bytes: int) -> None:
    """Drop what was appended to unscored.jsonl after a checkpoint, since the resumed run appends it again."""
    if unscored_bytes(folder) > num_bytes:
        os.truncate(folder / UNSCORED_FILE, num_bytes)


def _write_unscored(folder: Path, warn: Callable[[str], None], step: int | None, reasons: Sequence[str]) -> None:
    """Append to unscored.jsonl, and warn of the first entry of a run."""
    if not reasons:
        return
    if not unscored_bytes(folder):
        warn(f"not scored and left out: {reasons[0]}; from here on such rows are only counted, see {UNSCORED_FILE}")
    with append_to(folder / UNSCORED_FILE) as file:
        file.writelines(json.dumps({"step": step, "reason": reason}) + "\n" for reason in reasons)


def training_sampling(config: Config, environment: Environment) -> Sampling:
    """Sampling parameters of training rollouts; each request gets a separate seed."""
    return replace(rollout_sampling(config, environment), exact=False)


def evaluation_sampling(config: Config, environment: Environment) -> Sampling:
    """Sampling parameters of the sampled answers to held-out rows: those of `evaluate`, else of `rollout`."""
    of_rollout, evaluate = rollout_sampling(config, environment), config.evaluate
    temperature = of_rollout.temperature if evaluate.temperature is None else evaluate.temperature
    top_p = of_rollout.top_p if evaluate.top_p is None else evaluate.top_p
    return replace(of_rollout, temperature=temperature, top_p=top_p)


def rollout_sampling(config: Config, environment: Environment) -> Sampling:
    """Sampling parameters from the settings of `rollout`, and where answers end."""
    rollout = config.rollout
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop=rollout.stop,
        answer_end=answer_end_of(config, environment),
    )


def answer_end_of(config: Config, environment: Environment) -> AnswerEnd | None:
    """The end at which completions stop; None without `rollout.stop_after_answer`.

    ConfigError where the environment does not say where its answers end.
    """
    if not config.rollout.stop_after_answer:
        return None
    end = declared_end(environment)
    if end is None:
        raise ConfigError(
            f"rollout.stop_after_answer=true, but environment={config.environment.name} does not say where an answer "
            "ends, or the parts of a mixture say different ends; set rollout.stop_after_answer=false, or give your "
            "environment answer_end = AnswerEnd(), of fovea.types"
        )
    return end
