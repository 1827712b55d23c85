"""The rollout of a step, from rows to scored groups: one batch, or with dynamic sampling as many as the step needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from fovea.config.run import Config
from fovea.metrics.log import Phases
from fovea.rollout.base import CountsPrefill, Engine
from fovea.rollout.collect import collect
from fovea.rollout.conversation import SessionLog
from fovea.run.augmentations import augmentation_metrics, with_augmentations
from fovea.run.context import Run, TaskStream
from fovea.run.sampling import training_sampling
from fovea.types import Group, Metrics

SAME_ACCURACY = 1e-6
"""Accuracies of a group within this range count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollout:
    """Scored groups of one step."""

    groups: Sequence[Group]
    to_train: Sequence[Group]
    dropped: Sequence[Group]
    """Groups left out by dynamic sampling."""
    unscored: Sequence[str] = ()
    """One reason for each group that was left out because it has no score."""
    failed: Sequence[str] = ()
    """One reason for each episode that was left out because its session failed."""
    metrics: Metrics

    @property
    def reward(self) -> float:
        """Mean reward of all episodes; there must be at least one."""
        rewards = [episode.score.reward for group in self.groups for episode in group.episodes]
        return sum(rewards) / len(rewards)


async def sample_step(run: Run, step: int, phases: Phases) -> StepRollout:
    """Roll out a step in its curriculum stage; steps run in order, since rewards decide the stage of the next step."""
    curriculum = run.stream.curriculum
    if (change := curriculum.begin_step(step)) is not None:
        run.progress.print(f"step {step}: {change}")
        run.stream.order.weigh_levels(curriculum.level_weights)
    _prefill_metrics(run.engine)  # discard the counts of an evaluation
    rollout = await roll_out(run.engine, run.stream, run.config, step=step, phases=phases)
    metrics = rollout.metrics | curriculum.metrics() | run.sources.bad_rows.metrics()
    metrics |= _prefill_metrics(run.engine)
    if rollout.groups:
        curriculum.end_step(rollout.reward)
    return replace(rollout, metrics=metrics)


def _prefill_metrics(engine: Engine) -> Metrics:
    return engine.prefill_metrics() if isinstance(engine, CountsPrefill) else {}


async def roll_out(engine: Engine, stream: TaskStream, config: Config, *, step: int, phases: Phases) -> StepRollout:
    """Roll out `prompts_per_step` groups; with dynamic sampling, as many of mixed accuracy, within `max_gen_batches`.

    Dynamic sampling follows Yu et al., DAPO, arXiv 2503.14476, section 3.2, but with accuracy instead of reward.
    """
    sessions = SessionLog()
    sample_batch = partial(_sample_batch, engine, stream, config, sessions, phases, step)
    rollout = await _roll_out(stream, config, sample_batch)
    metrics = dict(rollout.metrics)
    if config.rollout.augmentation:
        metrics |= augmentation_metrics(rollout.groups, config.rollout.augmentation, step, config.max_steps)
    has_sessions = stream.environment.has_sessions
    if stream.grading.waits or has_sessions:
        metrics["groups/unscored"] = float(len(rollout.unscored))
    if has_sessions:
        metrics |= sessions.metrics()
    elif stream.grading.drops_completions:
        metrics |= sessions.failed_metrics()
    failed = tuple(str(failure) for failure in sessions.failures if failure.reward is None)
    return replace(rollout, failed=failed, metrics=metrics)


async def _sample_batch(
    engine: Engine,
    stream: TaskStream,
    config: Config,
    sessions: SessionLog,
    phases: Phases,
    step: int,
    num_before: int,
) -> tuple[list[Group], list[str]]:
    """Sample one batch; returns its scored groups, and one reason for each group that was left out."""
    rollout, unscored = config.rollout, list[str]()
    with phases("data"):
        prompted = stream.source.take(stream.order, rollout.prompts_per_step)
        if rollout.augmentation or config.algorithm.augmentation:
            prompted = with_augmentations(stream.source, prompted, config, step=step, num_before=num_before)
    with phases("rollout"):
        groups = await collect(
            engine,
            stream.interaction,
            prompted,
            sampling=training_sampling(config, stream.environment),
            n=rollout.samples_per_prompt,
            seed=(config.seed, step),
            num_before=num_before,
            unscored=unscored,
            sessions=sessions,
            fewest=2 if config.algorithm.compares else 1,
            for_update=True,
            num_noisy=0
            if rollout.augmentation is None
            else rollout.augmentation.num_sampled(rollout.samples_per_prompt),
        )
    return groups, unscored


SampleBatch: TypeAlias = Callable[[int], Awaitable[tuple[list[Group], list[str]]]]
"""Samples a further batch of a step, given the number of groups before it."""


async def _roll_out(stream: TaskStream, config: Config, sample_batch: SampleBatch) -> StepRollout:
    dynamic, wanted, num_batches = config.algorithm.dynamic_sampling, config.rollout.prompts_per_step, 1
    groups, unscored = await sample_batch(0)
    if dynamic is None:
        return StepRollout(groups=groups, to_train=groups, dropped=(), unscored=unscored, metrics={})
    # by accuracy: a group whose rewards differ only by a small format reward has nothing to teach
    while sum(map(_differs, groups)) < wanted and num_batches < dynamic.max_gen_batches and stream.has_more:
        more, more_unscored = await sample_batch(num_batches * wanted)
        groups, unscored = [*groups, *more], [*unscored, *more_unscored]
        num_batches += 1
    mixed, alike = [each for each in groups if _differs(each)], [each for each in groups if not _differs(each)]
    to_train, left_over = mixed[:wanted], mixed[wanted:]
    return StepRollout(
        groups=groups,
        to_train=to_train,
        dropped=alike + left_over,
        unscored=unscored,
        metrics={
            "dynamic_sampling/batches": float(num_batches),
            "dynamic_sampling/groups_dropped": float(len(alike)),
            "dynamic_sampling/groups_left_over": float(len(left_over)),
            "dynamic_sampling/groups_missing": float(wanted - len(to_train)),
        },
    )


def _differs(group: Group) -> bool:
    accuracies = [episode.score.accuracy for episode in group.episodes]
    return max(accuracies) - min(accuracies) > SAME_ACCURACY
