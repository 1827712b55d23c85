"""The training loop in which engines sample the next steps while the policy trains; `loop.py` is the synchronous one.

Completions come from a policy that is up to `rollout.max_staleness_steps` steps older. The loss corrects for this with
the ratio to the log-probs under which they were sampled (decision 020). Policy and engines must run in separate
processes.
"""

from __future__ import annotations

from collections.abc import Sequence

from fovea.loop import learn
from fovea.report.summary import Summary
from fovea.run.ahead import RolloutsAhead, drawing_ahead
from fovea.run.context import Run
from fovea.run.lifecycle import begin, closing, end_early, finish, record, save_last, stopping
from fovea.run.signals import Stop
from fovea.run.state import TrainState
from fovea.samples import staleness
from fovea.types import Group, Metrics
from fovea_gym.utils.event_loop import wait_for


def train(run: Run) -> Summary:
    """Train a run as `loop.train` does, but sample up to `rollout.max_staleness_steps` steps ahead of the policy."""
    with stopping(run) as stop:
        return wait_for(_train(run, stop))


async def _train(run: Run, stop: Stop) -> Summary:
    async with closing(run):
        state = await begin(run)
        with stop.after_step():
            async with drawing_ahead(run, state.step) as ahead:
                while state.step < run.config.max_steps and ahead.has_more(state.step):
                    with run.profile(state.step), run.phases("step"):
                        groups, metrics = await take_step(run, state, ahead)
                    state = await record(run, state, groups, metrics)
                    if stop.reason:
                        await ahead.put_back()
                        await end_early(run, state, stop)
            # within `after_step`, so that a signal waits for the save, as it waits for a step
            await save_last(run, state)
        return await finish(run, state)


async def take_step(run: Run, state: TrainState, ahead: RolloutsAhead) -> tuple[Sequence[Group], Metrics]:
    """Take one step, from a rollout by current or older weights to new weights, while the next rollout is sampled."""
    rollout = await ahead.take(state.step)
    metrics = await learn(run, state, rollout)
    metrics |= await ahead.trained(state.step + 1)
    return rollout.groups, metrics | staleness(rollout.groups, state.step)
