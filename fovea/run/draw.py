"""The rollout of a step, from rows to scored groups, and what it moves on: data order, curriculum, list of bad rows."""

from __future__ import annotations

from dataclasses import replace

from fovea.metrics.log import Phases
from fovea.run.context import Run
from fovea.run.rollout_step import Rollout, roll_out


async def draw(run: Run, step: int, phases: Phases) -> Rollout:
    """Roll out a step in its curriculum stage; its rewards count for the stage of the next one.

    Rollouts are drawn in the order of their steps, one after another.
    """
    _begin_stage(run, step)
    rollout = await roll_out(run.engine, run.stream, run.config, step=step, phases=phases)
    curriculum = run.stream.curriculum
    metrics = rollout.metrics | curriculum.metrics() | run.sources.bad_rows.metrics()
    if rollout.groups:
        curriculum.end_step(rollout.reward)
    return replace(rollout, metrics=metrics)


def _begin_stage(run: Run, step: int) -> None:
    """Enter the curriculum stage of this step; print a new stage, and apply its level weights to the data order."""
    change = run.stream.curriculum.begin_step(step)
    if change is not None:
        run.progress.print(f"step {step}: {change}")
        run.stream.order.weigh_levels(run.stream.curriculum.level_weights)
