"""The rollout of a step: one batch of groups, or with dynamic sampling as many as fill the step with useful ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fovea.config.run import Config
from fovea.data.order import Order
from fovea.environments.base import Environment
from fovea.environments.curriculum import Curriculum
from fovea.environments.graders.grading import Grading
from fovea.environments.prompt_source import PromptSource
from fovea.errors import TrainError
from fovea.metrics.log import Phases
from fovea.rollout.base import Engine
from fovea.rollout.collect import Interaction, collect
from fovea.types import Group, Metrics, Sampling

SAME_ACCURACY = 1e-6
UNSCORED_FILE = "unscored.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStream:
    """Training prompts in the run's order, and the environment of the present curriculum stage."""

    source: PromptSource
    order: Order
    curriculum: Curriculum
    environment: Environment
    grading: Grading

    @property
    def interaction(self) -> Interaction:
        """With the grader of the present stage of the curriculum."""
        return Interaction(
            environment=self.environment,
            grading=self.grading.at(self.curriculum.stage),
            renderer=self.source.renderer,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Scored groups of one step."""

    groups: Sequence[Group]
    """All that were scored."""
    to_train: Sequence[Group]
    """Groups that make the step."""
    dropped: Sequence[Group]
    """Groups that dynamic sampling leaves out."""
    unscored: Sequence[str] = ()
    """One reason for each group that got no score and was left out."""
    metrics: Metrics


async def draw(engine: Engine, stream: TaskStream, config: Config, *, step: int, phases: Phases) -> Rollout:
    """Draw `prompts_per_step` groups; with dynamic sampling that many of mixed accuracy, within `max_gen_batches`.

    Yu et al., DAPO, arXiv 2503.14476, section 3.2, by accuracy and not by reward: a part of the reward that every
    answer gets, or a small one for the format, says nothing about the group.
    """
    wanted = config.rollout.prompts_per_step
    first = await _rollout(engine, stream, config, step=step, num_before=0, phases=phases)
    dynamic = config.algorithm.dynamic_sampling
    if dynamic is None:
        return first
    batches, groups, unscored = 1, list(first.groups), list(first.unscored)
    mixed, alike = _parted(groups)
    while len(mixed) < wanted and batches < dynamic.max_gen_batches:
        more = await _rollout(engine, stream, config, step=step, num_before=batches * wanted, phases=phases)
        more_mixed, more_alike = _parted(more.groups)
        groups, unscored = [*groups, *more.groups], [*unscored, *more.unscored]
        mixed, alike = mixed + more_mixed, alike + more_alike
        batches += 1
    to_train = mixed[:wanted]
    return Rollout(
        groups=groups,
        to_train=to_train,
        dropped=alike + mixed[wanted:],
        unscored=unscored,
        metrics=_unscored_metrics(stream, unscored)
        | {
            "dynamic_sampling/batches": float(batches),
            "dynamic_sampling/groups_dropped": float(len(alike)),
            "dynamic_sampling/groups_left_over": float(len(mixed) - len(to_train)),
            "dynamic_sampling/groups_missing": float(wanted - len(to_train)),
        },
    )


async def _rollout(
    engine: Engine, stream: TaskStream, config: Config, *, step: int, num_before: int, phases: Phases
) -> Rollout:
    """One batch of groups, all of them to be trained on."""
    rollout, unscored = config.rollout, list[str]()
    with phases("data"):
        prompted = stream.source.take(stream.order, rollout.prompts_per_step)
    with phases("rollout"):
        groups = await collect(
            engine,
            stream.interaction,
            prompted,
            sampling=training_sampling(config),
            n=rollout.samples_per_prompt,
            seed=(config.seed, step),
            num_before=num_before,
            unscored=unscored,
            for_update=True,
        )
    return Rollout(
        groups=groups, to_train=groups, dropped=(), unscored=unscored, metrics=_unscored_metrics(stream, unscored)
    )


def _unscored_metrics(stream: TaskStream, unscored: Sequence[str]) -> Metrics:
    """The count of groups without a score, for graders that may have none."""
    return {"groups/unscored": float(len(unscored))} if stream.grading.calls is not None else {}


def _parted(groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
    """Groups with answers both better and worse, and those without."""
    return [group for group in groups if _differs(group)], [group for group in groups if not _differs(group)]


def _differs(group: Group) -> bool:
    accuracies = [episode.score.accuracy for episode in group.episodes]
    return max(accuracies) - min(accuracies) > SAME_ACCURACY


def record_unscored(folder: Path, step: int, rollout: Rollout) -> None:
    """List groups without a score in unscored.jsonl; TrainError when no group of the step has one."""
    if rollout.unscored:
        _write_unscored(folder, [{"step": step, "reason": reason} for reason in rollout.unscored])
    if not rollout.groups:
        raise TrainError(
            f"none of the {len(rollout.unscored)} groups of step {step} could be scored; the last: "
            f"{rollout.unscored[-1]}; fix that ({UNSCORED_FILE} of the run folder has them all) and go on with "
            "resume=auto"
        )


def record_unscored_answer(folder: Path, reason: str) -> None:
    """List an answer of a held-out row that got no score."""
    _write_unscored(folder, [{"step": None, "reason": reason}])


def _write_unscored(folder: Path, rows: Sequence[Mapping[str, object]]) -> None:
    with (folder / UNSCORED_FILE).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def training_sampling(config: Config) -> Sampling:
    """How the rollout draws for training; each request gets a seed of its own."""
    return replace(rollout_sampling(config), exact=False)


def rollout_sampling(config: Config) -> Sampling:
    """The settings of `rollout` as an engine takes them."""
    rollout = config.rollout
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop=rollout.stop,
    )
