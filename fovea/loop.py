"""A run from beginning to end, and one step of it on one screen (docs/step.md walks through it)."""

from __future__ import annotations

from fovea.rollout.collect import collect
from fovea.rollout.wait import wait_for
from fovea.run import Run
from fovea.samples import episode_metrics, make_batch, with_old_logprobs, with_reference_logprobs
from fovea.stages import begin, finish, record
from fovea.summary import Summary
from fovea.types import Batch, Group, Metrics, Sampling


def train(run: Run) -> Summary:
    """Warm up or resume, take the steps, evaluate; every file of the run folder is written on the way."""
    with run.metrics, run.progress:
        standing = begin(run)
        for step in range(standing.step, run.config.max_steps):
            with run.profile(step), run.phases("step"):
                groups, metrics = wait_for(take_step(run, step))
            standing = record(run, standing, groups, metrics)
        return finish(run, standing)


async def take_step(run: Run, step: int) -> tuple[list[Group], Metrics]:
    """Rows in, new weights out. `step` counts from 0 and is the version of the policy that draws."""
    settings, phases = run.config, run.phases
    with phases("data"):
        prompted = run.sources.train.take(run.order, settings.rollout.prompts_per_step)
    with phases("rollout"):
        groups = await collect(
            run.engine,
            run.environment,
            prompted,
            sampling=sampling_of(run),
            n=settings.rollout.samples_per_prompt,
            seed=(settings.seed, step),
        )
    with phases("samples"):
        batch, counts = make_batch(
            groups,
            normalize_by_std=settings.algorithm.normalize_by_std,
            max_groups_without_signal=groups_without_signal_kept(run),
        )
    with phases("logprobs"):
        batch = add_logprobs(run, batch)
    with phases("update"):
        update = run.policy.update(batch)
    with phases("sync"):
        run.engine.load_weights(run.policy.weights(), version=step + 1)
    return groups, episode_metrics(groups) | counts | update


def groups_without_signal_kept(run: Run) -> int:
    """A KL term acts on every group: leaving any out would change its gradient."""
    if run.config.algorithm.kl_coef > 0:
        return run.config.rollout.prompts_per_step
    return run.config.algorithm.max_groups_without_signal


def add_logprobs(run: Run, batch: Batch) -> Batch:
    """Only what the update cannot make itself: its first optimizer step is on-policy, KL 0 needs no reference.

    With one step per epoch the first epoch sees every sample before any step, and its log-probs serve the later ones.
    """
    settings = run.config
    if settings.train.minibatches > 1:
        batch = with_old_logprobs(batch, run.policy.logprobs(batch))
    if settings.algorithm.kl_coef > 0:
        batch = with_reference_logprobs(batch, run.policy.reference_logprobs(batch))
    return batch


def sampling_of(run: Run) -> Sampling:
    """How the rollout draws; each request gets a seed of its own."""
    rollout = run.config.rollout
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop=rollout.stop,
        trace=True,
    )
