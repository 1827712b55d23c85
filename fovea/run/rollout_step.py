"""The completions of a step: one rollout, or with dynamic sampling as many as fill the step with groups that differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fovea.config.run import Config
from fovea.environments.base import WaitsToScore
from fovea.errors import TrainError
from fovea.rollout.collect import collect
from fovea.run.context import Run
from fovea.types import Group, Metrics, Sampling

SAME_ACCURACY = 1e-6
UNSCORED_FILE = "unscored.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What the rollouts of a step gave."""

    groups: list[Group]
    """All of them."""
    to_train: list[Group]
    """Those that make the step."""
    dropped: list[Group]
    """The others."""
    metrics: Metrics


async def draw(run: Run, sampling: Sampling, step: int) -> Drawn:
    """`prompts_per_step` groups; with dynamic sampling that many with answers both better and worse, if they come.

    Yu et al., DAPO, arXiv 2503.14476, section 3.2, by accuracy and not by reward: a part of the reward that every
    answer gets, or a small one for the format, says nothing about the group.
    """
    wanted = run.config.rollout.prompts_per_step
    unscored: list[str] = []
    groups = await _rollout(run, sampling, step, 0, unscored)
    if not run.config.algorithm.dynamic_sampling:
        return Drawn(groups=groups, to_train=groups, dropped=[], metrics=note_unscored(run, step, groups, unscored))
    batches, differing, alike = 1, *_parted(groups)
    while len(differing) < wanted and batches < run.config.algorithm.max_gen_batches:
        more = await _rollout(run, sampling, step, batches * wanted, unscored)
        more_differing, more_alike = _parted(more)
        groups, differing, alike = groups + more, differing + more_differing, alike + more_alike
        batches += 1
    to_train = differing[:wanted]
    return Drawn(
        groups=groups,
        to_train=to_train,
        dropped=alike + differing[wanted:],
        metrics=note_unscored(run, step, groups, unscored)
        | {
            "dynamic_sampling/batches": float(batches),
            "dynamic_sampling/groups_dropped": float(len(alike)),
            "dynamic_sampling/groups_left_over": float(len(differing) - len(to_train)),
            "dynamic_sampling/groups_missing": float(wanted - len(to_train)),
        },
    )


def note_unscored(run: Run, step: int, groups: Sequence[Group], reasons: Sequence[str]) -> Metrics:
    """Count the groups that could not be scored, and write down why; TrainError when they are all that there is.

    For environments that wait to score; the others always do.
    """
    if not isinstance(run.environment, WaitsToScore):
        return {}
    if reasons:
        _write_unscored(run.folder, [{"step": step, "reason": reason} for reason in reasons])
    if not groups:
        raise TrainError(
            f"none of the {len(reasons)} groups of step {step} could be scored; the last: {reasons[-1]}; mend that "
            f"({UNSCORED_FILE} of the run folder has them all) and go on with resume=auto"
        )
    return {"groups/unscored": float(len(reasons))}


def note_unscored_answer(folder: Path, reason: str) -> None:
    """Write down an answer of a reading that got no score."""
    _write_unscored(folder, [{"step": None, "reason": reason}])


def _write_unscored(folder: Path, rows: Sequence[Mapping[str, object]]) -> None:
    with (folder / UNSCORED_FILE).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


async def _rollout(run: Run, sampling: Sampling, step: int, num_before: int, unscored: list[str]) -> list[Group]:
    rollout = run.config.rollout
    with run.phases("data"):
        prompted = run.sources.train.take(run.order, rollout.prompts_per_step)
    with run.phases("rollout"):
        return await collect(
            run.engine,
            run.curriculum.environment,
            prompted,
            sampling=sampling,
            n=rollout.samples_per_prompt,
            seed=(run.config.seed, step),
            num_before=num_before,
            unscored=unscored,
        )


def _parted(groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
    """Groups with answers both better and worse, and those without."""
    return [group for group in groups if _differs(group)], [group for group in groups if not _differs(group)]


def _differs(group: Group) -> bool:
    accuracies = [episode.score.accuracy for episode in group.episodes]
    return max(accuracies) - min(accuracies) > SAME_ACCURACY


def sampling_of(run: Run) -> Sampling:
    """How the rollout draws for training; each request gets a seed of its own."""
    return replace(rollout_sampling(run.config), trace=True)


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
