"""The two training loops, in turn and ahead, and one training step (docs/step.md explains it)."""

from __future__ import annotations

from collections.abc import Sequence

from fovea.advantages import with_advantages
from fovea.report.summary import Summary
from fovea.run.ahead import drawing_ahead
from fovea.run.context import Run
from fovea.run.lifecycle import begin, closing, end_early, finish, record, save_last, stopping
from fovea.run.parity import check_rollout, check_sync
from fovea.run.recorded import record_samples
from fovea.run.rollout_step import StepRollout, sample_step
from fovea.run.signals import Stop
from fovea.run.state import TrainState
from fovea.run.unscored import record_unscored
from fovea.samples import episode_metrics, make_batch, staleness
from fovea.train.base import Needs
from fovea.types import Group, Metrics
from fovea_gym.utils.event_loop import wait_for


def train(run: Run) -> Summary:
    """Train a run to its end, from the start or a checkpoint: warm-up, steps, evaluation, files of the run folder.

    This works in scripts and in notebook cells. Signals are handled only if it is called in the main thread.
    """
    steps = steps_ahead if run.config.rollout.max_staleness_steps else steps_in_turn
    with stopping(run) as stop:
        return wait_for(steps(run, stop))


async def steps_in_turn(run: Run, stop: Stop) -> Summary:
    """Sample each step with the weights of the step before, while the policy waits."""
    async with closing(run):
        state = await begin(run)
        with stop.after_step():
            while state.step < run.config.max_steps and run.stream.has_more:
                with run.profile(state.step), run.phases("step"):
                    groups, metrics = await take_step(run, state)
                state = await record(run, state, groups, metrics)
                if stop.reason:
                    await end_early(run, state, stop)
            # within `after_step`, so that a signal waits for the save, as it waits for a step
            await save_last(run, state)
        return await finish(run, state)


async def steps_ahead(run: Run, stop: Stop) -> Summary:
    """Sample the next steps while the policy trains, by weights up to `rollout.max_staleness_steps` steps older.

    The loss corrects for this with the ratio to the log-probs under which completions were sampled (decision 020).
    Policy and engines must run in separate processes.
    """
    async with closing(run):
        state = await begin(run)
        with stop.after_step():
            async with drawing_ahead(run, state.step) as ahead:
                while state.step < run.config.max_steps and ahead.has_more(state.step):
                    with run.profile(state.step), run.phases("step"):
                        rollout = await ahead.take(state.step)
                        metrics = await learn(run, state, rollout)
                        metrics |= await ahead.trained(state.step + 1)
                        metrics |= staleness(rollout.groups, state.step)
                    state = await record(run, state, rollout.groups, metrics)
                    if stop.reason:
                        await ahead.put_back()
                        await end_early(run, state, stop)
            # within `after_step`, as above
            await save_last(run, state)
        return await finish(run, state)


async def take_step(run: Run, state: TrainState) -> tuple[Sequence[Group], Metrics]:
    """Take one step, from rows to new weights; `state.step`, counted from 0, is the version of the sampling policy."""
    rollout = await sample_step(run, state.step, run.phases)
    await run.engine.sleep()
    metrics = await learn(run, state, rollout)
    with run.phases("weight_sync"):
        report = await run.weight_sync.sync(state.step + 1)
        await run.engine.wake()
    await check_sync(run, report)
    return rollout.groups, metrics | report.metrics()


async def learn(run: Run, state: TrainState, rollout: StepRollout) -> Metrics:
    """Train on a rollout, from scored groups to new policy weights; returns the metrics of rollout and update."""
    config, phases = run.config, run.phases
    record_unscored(run.folder, run.progress.warn, state.step, rollout)
    with phases("samples"):
        max_new_tokens = config.rollout.max_new_tokens
        batch, counts = make_batch(
            rollout.to_train, config.algorithm, max_new_tokens=max_new_tokens, dropped=rollout.dropped
        )
    with phases("logprobs"):
        batch = await run.policy.compute_logprobs(batch, Needs.of(config.algorithm, dropout=config.model.has_dropout))
    with phases("advantages"):
        batch, advantages = with_advantages(batch, config.algorithm, state.kl_coef)
    await record_samples(run, state.step + 1, rollout.groups, batch)
    with phases("update"):
        update = await run.policy.update(batch)
    await check_rollout(run, state.step, batch, update)
    return episode_metrics(rollout.groups) | rollout.metrics | counts | advantages | update
