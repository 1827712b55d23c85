"""The training loop, and one step of it on one screen (docs/step.md walks through it)."""

from __future__ import annotations

from collections.abc import Sequence

from fovea.advantages import with_advantages
from fovea.report.summary import Summary
from fovea.run.context import Run
from fovea.run.lifecycle import begin, begin_stage, closing, finish, record, save_and_say
from fovea.run.rollout_step import record_unscored, roll_out
from fovea.run.signals import ending_signals
from fovea.run.state import TrainState
from fovea.samples import episode_metrics, make_batch
from fovea.train.base import Needs
from fovea.types import Group, Metrics
from fovea.utils.event_loop import wait_for


def train(run: Run) -> Summary:
    """Train a run from start or resume to its end: warm-up, steps, evaluation, and the files of the run folder.

    Works in a script and in a cell of a notebook alike.
    """
    return wait_for(train_in_loop(run))


async def train_in_loop(run: Run) -> Summary:
    """Train as `train` does, on the event loop of an asynchronous program."""
    async with closing(run):
        with ending_signals() as stop:
            state = await begin(run)
            with stop.after_step():
                while state.step < run.config.max_steps and run.stream.has_more:
                    with run.profile(state.step), run.phases("step"):
                        groups, metrics = await take_step(run, state)
                    state = await record(run, state, groups, metrics)
                    if stop.received is not None:
                        await save_and_say(run, state)
                        break
            return await finish(run, state)


async def take_step(run: Run, state: TrainState) -> tuple[Sequence[Group], Metrics]:
    """Take one step, from rows to new weights. `state.step`, from 0, is the version of the policy that samples."""
    config, phases = run.config, run.phases
    begin_stage(run, state.step)
    rollout = await roll_out(run.engine, run.stream, config, step=state.step, phases=phases)
    record_unscored(run.folder, state.step, rollout)
    with phases("samples"):
        max_new_tokens = config.rollout.max_new_tokens
        batch, counts = make_batch(
            rollout.to_train, config.algorithm, max_new_tokens=max_new_tokens, dropped=rollout.dropped
        )
    await run.engine.sleep()
    with phases("logprobs"):
        batch = await run.policy.annotate(batch, Needs.of(config.algorithm, dropout=config.model.has_dropout))
    with phases("advantages"):
        batch, advantages = with_advantages(batch, config.algorithm, state.kl_coef)
    with phases("update"):
        update = await run.policy.update(batch)
    with phases("sync"):
        await run.weight_sync.push(state.step + 1)
        await run.engine.wake()
    return rollout.groups, episode_metrics(rollout.groups) | rollout.metrics | counts | advantages | update
