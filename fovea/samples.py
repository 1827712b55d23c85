"""From scored groups to samples: advantages, and which groups are worth a gradient; every drop is counted.

Axes: `P` groups, `G` episodes of a group, `T` tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from fovea.algorithms.advantage import group_advantages, has_signal
from fovea.types import Batch, Episode, Group, Metrics, Sample, SampleGroup


def make_batch(
    groups: Sequence[Group], *, normalize_by_std: bool, max_groups_without_signal: int
) -> tuple[Batch, Metrics]:
    """Samples of the groups whose rewards differ, and of the worst `max_groups_without_signal` others.

    The loss is a mean over ALL action tokens of the step: a group without signal has no policy gradient, so that
    leaving it out saves its pass and changes nothing (an entropy bonus and a KL term do act on the groups kept).
    """
    rewards_PG = torch.tensor([[episode.score.reward for episode in group.episodes] for group in groups])
    advantages_PG = group_advantages(rewards_PG, normalize_by_std=normalize_by_std).tolist()
    signal_P = has_signal(rewards_PG)
    silent = (~signal_P).nonzero()[:, 0]
    worst_first = silent[rewards_PG[silent].mean(1).sort(stable=True).indices].tolist()
    kept = [*signal_P.nonzero()[:, 0].tolist(), *worst_first[:max_groups_without_signal]]
    batch = Batch(
        groups=tuple(_sample_group(groups[index], advantages_PG[index]) for index in kept),
        normalizer_tokens=sum(len(e.completion.token_ids_T) for group in groups for e in group.episodes),
    )
    return batch, {
        "groups/with_signal": float(signal_P.sum()),
        "groups/without_signal": float(len(silent)),
        "groups/skipped": float(len(groups) - len(kept)),
    }


def _sample_group(group: Group, advantages: Sequence[float]) -> SampleGroup:
    samples = (_sample(episode, value) for episode, value in zip(group.episodes, advantages, strict=True))
    return SampleGroup(prompt=group.prompt, samples=tuple(samples))


def _sample(episode: Episode, advantage: float) -> Sample:
    completion = episode.completion
    return Sample(
        token_ids_T=completion.token_ids_T,
        rollout_logprobs_T=completion.logprobs_T,
        advantages_T=np.full(len(completion.token_ids_T), advantage, dtype=np.float32),
        trace=completion.trace,
    )


def with_old_logprobs(batch: Batch, logprobs: Sequence[NDArray[np.float32]]) -> Batch:
    """The batch with the trainer's log-probs from before the update, one array [T] per sample in order."""
    values = iter(logprobs)
    return _replace_samples(batch, lambda sample: replace(sample, old_logprobs_T=next(values)))


def has_old_logprobs(batch: Batch) -> bool:
    """Whether the samples bring log-probs from before the update."""
    return any(sample.old_logprobs_T is not None for group in batch.groups for sample in group.samples)


def with_reference_logprobs(batch: Batch, logprobs: Sequence[NDArray[np.float32]]) -> Batch:
    """The batch with the reference model's log-probs, one array [T] per sample in order."""
    values = iter(logprobs)
    return _replace_samples(batch, lambda sample: replace(sample, reference_logprobs_T=next(values)))


def _replace_samples(batch: Batch, change: Callable[[Sample], Sample]) -> Batch:
    groups = (replace(group, samples=tuple(map(change, group.samples))) for group in batch.groups)
    return replace(batch, groups=tuple(groups))


def episode_metrics(groups: Sequence[Group]) -> Metrics:
    """Means over the episodes of a step; accuracies by question type where there are several."""
    episodes = [episode for group in groups for episode in group.episodes]
    lengths = [len(episode.completion.token_ids_T) for episode in episodes]
    metrics = {
        "reward": _mean([episode.score.reward for episode in episodes]),
        "accuracy": _mean([episode.score.accuracy for episode in episodes]),
        "response_tokens_mean": _mean(lengths),
        "response_tokens_max": float(max(lengths)),
        "truncated_frac": _mean([episode.completion.finish == "length" for episode in episodes]),
    }
    for name in sorted({name for episode in episodes for name in episode.score.parts}):
        metrics[f"reward/{name}"] = _mean([episode.score.parts.get(name, 0.0) for episode in episodes])
    kinds = sorted({episode.task.kind for episode in episodes})
    for kind in kinds if len(kinds) > 1 else []:
        metrics[f"accuracy/train/{kind}"] = _mean(
            [episode.score.accuracy for episode in episodes if episode.task.kind == kind]
        )
    return metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
