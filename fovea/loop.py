"""A run from beginning to end, and one step of it on one screen (docs/step.md walks through it)."""

from __future__ import annotations

from fovea.advantages import with_advantages
from fovea.report.summary import Summary
from fovea.run.context import Run
from fovea.run.lifecycle import Standing, begin, finish, record, start_stage
from fovea.run.rollout_step import draw, sampling_of
from fovea.samples import (
    episode_metrics,
    make_batch,
    with_old_logprobs,
    with_reference_logprobs,
    with_values,
)
from fovea.types import Batch, Group, Metrics
from fovea.utils.event_loop import wait_for


def train(run: Run) -> Summary:
    """Warm up or resume, take the steps, evaluate; every file of the run folder is written on the way."""
    with run.metrics, run.progress:
        standing = begin(run)
        while standing.step < run.config.max_steps:
            with run.profile(standing.step), run.phases("step"):
                groups, metrics = wait_for(take_step(run, standing))
            standing = record(run, standing, groups, metrics)
        return finish(run, standing)


async def take_step(run: Run, standing: Standing) -> tuple[list[Group], Metrics]:
    """Rows in, new weights out. `standing.step` counts from 0 and is the version of the policy that draws."""
    settings, phases = run.config, run.phases
    start_stage(run, standing.step)
    drawn = await draw(run, sampling_of(run), standing.step)
    with phases("samples"):
        max_new_tokens = settings.rollout.max_new_tokens
        batch, counts = make_batch(
            drawn.to_train, settings.algorithm, max_new_tokens=max_new_tokens, dropped=drawn.dropped
        )
    with phases("logprobs"):
        batch = add_logprobs(run, batch)
    with phases("advantages"):
        batch, advantages = with_advantages(batch, settings.algorithm, standing.kl_coef)
    with phases("update"):
        update = run.policy.update(batch)
    with phases("sync"):
        run.engine.load_weights(run.policy.weights(), version=standing.step + 1)
    return drawn.groups, episode_metrics(drawn.groups) | drawn.metrics | counts | advantages | update


def add_logprobs(run: Run, batch: Batch) -> Batch:
    """Only what the update cannot make itself: its first optimizer step is on-policy, KL 0 needs no reference.

    With one step per epoch the first epoch sees every sample before any step, and its log-probs serve the later ones.
    """
    algorithm = run.config.algorithm
    one_pass_for_both = algorithm.needs_values and run.config.critic.trunk == "shared"
    if one_pass_for_both:
        logprobs, values = run.policy.logprobs_and_values(batch)
        batch = with_values(with_old_logprobs(batch, logprobs), values)
    elif algorithm.minibatches > 1 or algorithm.needs_old_logprobs:
        batch = with_old_logprobs(batch, run.policy.logprobs(batch))
    if algorithm.needs_values and not one_pass_for_both:
        batch = with_values(batch, run.policy.values(batch))
    if algorithm.kl_coef:
        batch = with_reference_logprobs(batch, run.policy.reference_logprobs(batch))
    return batch
