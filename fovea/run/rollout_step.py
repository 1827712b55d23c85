"""The rollout of a step, from rows to scored groups: one batch, or with dynamic sampling as many as fill the step.

Also views of its prompts: with noise to draw on (`rollout.views`), masked for the loss (`algorithm.views`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np

from fovea.config.run import Config
from fovea.config.views import RolloutViews
from fovea.data.prompt_source import PromptedTask, PromptSource
from fovea.data.views import SeededView, View, mask_of, noise_of
from fovea.errors import TrainError
from fovea.metrics.log import Phases
from fovea.rollout.base import CountsPrefill, Engine
from fovea.rollout.collect import collect
from fovea.rollout.conversation import SessionLog
from fovea.run.context import Run, TaskStream
from fovea.types import Group, Metrics, Prompt, Sampling
from fovea_gym.environments.base import Environment
from fovea_gym.errors import ConfigError
from fovea_gym.types import AnswerEnd
from fovea_gym.utils.bounded import append_to, read_lines
from fovea_gym.utils.files import write_atomically

SAME_ACCURACY = 1e-6
"""Accuracies of a group within this range count as equal."""
UNSCORED_FILE = "unscored.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollout:
    """Scored groups of one step."""

    groups: Sequence[Group]
    to_train: Sequence[Group]
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
    """Roll out a step in its curriculum stage, one step after another: its rewards count for the stage of the next."""
    curriculum = run.stream.curriculum
    if (change := curriculum.begin_step(step)) is not None:
        run.progress.print(f"step {step}: {change}")
        run.stream.order.weigh_levels(curriculum.level_weights)
    _prefill_metrics(run.engine)  # those of an evaluation
    rollout = await roll_out(run.engine, run.stream, run.config, step=step, phases=phases)
    metrics = rollout.metrics | curriculum.metrics() | run.sources.bad_rows.metrics()
    metrics |= _prefill_metrics(run.engine)
    if rollout.groups:
        curriculum.end_step(rollout.reward)
    return replace(rollout, metrics=metrics)


def _prefill_metrics(engine: Engine) -> Metrics:
    return engine.prefill_metrics() if isinstance(engine, CountsPrefill) else {}


async def roll_out(engine: Engine, stream: TaskStream, config: Config, *, step: int, phases: Phases) -> StepRollout:
    """Roll out `prompts_per_step` groups; with dynamic sampling that many of mixed accuracy, within `max_gen_batches`.

    Yu et al., DAPO, arXiv 2503.14476, section 3.2, by accuracy instead of reward.
    """
    sessions = SessionLog()
    draw_batch = partial(_draw_batch, engine, stream, config, sessions, phases, step)
    rollout = await _roll_out(stream, config, draw_batch)
    metrics = dict(rollout.metrics)
    if config.rollout.views:
        metrics |= view_metrics(rollout.groups, config.rollout.views, step, config.max_steps)
    has_sessions = stream.environment.has_sessions
    if stream.grading.waits or has_sessions:
        metrics["groups/unscored"] = float(len(rollout.unscored))
    if has_sessions:
        metrics |= sessions.metrics()
    elif stream.grading.drops_completions:
        metrics |= sessions.failed_metrics()
    failed = tuple(str(failure) for failure in sessions.failures if failure.reward is None)
    return replace(rollout, failed=failed, metrics=metrics)


async def _draw_batch(
    engine: Engine,
    stream: TaskStream,
    config: Config,
    sessions: SessionLog,
    phases: Phases,
    step: int,
    num_before: int,
) -> tuple[list[Group], list[str]]:
    """The scored groups of one batch, and the reasons of those that were left out."""
    rollout, unscored = config.rollout, list[str]()
    with phases("data"):
        prompted = stream.source.take(stream.order, rollout.prompts_per_step)
        if rollout.views or config.algorithm.views:
            prompted = with_views(stream.source, prompted, config, step=step, num_before=num_before)
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
            num_noisy=0 if rollout.views is None else rollout.views.num_drawn(rollout.samples_per_prompt),
        )
    return groups, unscored


DrawBatch: TypeAlias = Callable[[int], Awaitable[tuple[list[Group], list[str]]]]
"""Draws a batch of a step, after so many groups of it."""


async def _roll_out(stream: TaskStream, config: Config, draw_batch: DrawBatch) -> StepRollout:
    dynamic, wanted, num_batches = config.algorithm.dynamic_sampling, config.rollout.prompts_per_step, 1
    groups, unscored = await draw_batch(0)
    if dynamic is None:
        return StepRollout(groups=groups, to_train=groups, dropped=(), unscored=unscored, metrics={})
    # by accuracy: a group whose rewards differ by a small part for the format only has nothing to teach
    while sum(map(_differs, groups)) < wanted and num_batches < dynamic.max_gen_batches and stream.has_more:
        more, more_unscored = await draw_batch(num_batches * wanted)
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
    """Drop what was appended to unscored.jsonl after a checkpoint, since the resumed run appends it again.

    Damaged lines, as a failure of the machine leaves them, are dropped as well.
    """
    file = folder / UNSCORED_FILE
    if not file.exists():
        return
    os.truncate(file, min(num_bytes, file.stat().st_size))
    lines = list(read_lines(file, within=folder))
    whole = [line for line in lines if line.endswith(b"\n") and b"\0" not in line]
    if len(whole) < len(lines):
        write_atomically(file, b"".join(whole))


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
    """The end at which completions stop, if `rollout.stop_after_answer`; ConfigError if the environment names none."""
    if not config.rollout.stop_after_answer:
        return None
    end = environment.answer_end
    if end is None:
        raise ConfigError(
            f"rollout.stop_after_answer=true, but environment={config.environment.name} does not say where an answer "
            "ends, or the parts of a mixture say different ends; set rollout.stop_after_answer=false, or give your "
            "environment answer_end = AnswerEnd(), of fovea.types"
        )
    return end


NOISY, MASKED = 0, 1
"""Last but one of the numbers that seed a picture, after the run's seed, the step and the group."""


def in_one_turn(config: Config, environment: Environment) -> Environment:
    """The environment; ConfigError for views in one of several turns, whose later pictures no view changes."""
    given = {"rollout.views": config.rollout.views, "algorithm.views": config.algorithm.views}
    several = environment.max_turns > 1 or environment.has_sessions
    for key in (key for key, views in given.items() if views is not None and several):
        raise ConfigError(
            f"{key} changes the pictures of prompts, but environment={config.environment.name} shows others in later "
            f"turns, also by its tools; set {key}=null"
        )
    return environment


def with_views(
    source: PromptSource, prompted: Sequence[PromptedTask], config: Config, *, step: int, num_before: int
) -> list[PromptedTask]:
    """The tasks of a step, counted from 0, with the views that the settings ask for; the same in every run."""
    noisy, masked = config.rollout.views, config.algorithm.views
    noise: View | None = None if noisy is None else noise_of(noisy, step + 1, config.max_steps)
    mask: View | None = None if masked is None else mask_of(masked)

    def work(index: int, item: PromptedTask, view: View, kind: int) -> Callable[[], Prompt]:
        seed = (config.seed, step, index, kind)
        return source.view(item, lambda number: SeededView(view=view, seed=(*seed, number)))

    numbered = list(enumerate(prompted, start=num_before))
    views = [(kind, view) for kind, view in ((NOISY, noise), (MASKED, mask)) if view is not None]
    made = source.at_once(
        {(index, kind): work(index, item, view, kind) for kind, view in views for index, item in numbered}
    )
    return [replace(item, noisy=made.get((index, NOISY)), masked=made.get((index, MASKED))) for index, item in numbered]


def view_metrics(groups: Sequence[Group], settings: RolloutViews, step: int, max_steps: int) -> Metrics:
    """The noise of a step, counted from 0, and the accuracy of completions drawn on it; empty without any."""
    episodes = [episode for group in groups for episode in group.episodes if episode.tokens[0].on_view]
    if not episodes:
        return {}
    return {
        "views/noise_step": float(noise_of(settings, step + 1, max_steps).step),
        "accuracy/noisy": float(np.mean([episode.score.accuracy for episode in episodes])),
    }
