"""Training samples from scored groups: rewards, loss weights, and the choice of groups for the update.

Every group that is left out is counted in the metrics.

Axes: `P` groups, `G` episodes of a group, `T` tokens of a completion.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from fovea.algorithms.advantage import has_signal, overlong_penalty
from fovea.algorithms.aggregation import sample_weights
from fovea.config.algorithm import Algorithm
from fovea.metrics.turns import turn_metrics
from fovea.types import Batch, Episode, Group, Metrics, Sample, SampleGroup, TurnTokens

Value = TypeVar("Value", bound=np.generic)
WHITENED = ("reinforce++", "reinforce++_baseline", "gae")
"""Estimators whose advantages may differ from 0 in a group of equal rewards."""
COUNTS = ("groups/with_signal", "groups/without_signal", "groups/skipped")


def make_batch(
    groups: Sequence[Group], settings: Algorithm, *, max_new_tokens: int, dropped: Sequence[Group] = ()
) -> tuple[Batch, Metrics]:
    """The batch of all groups with a non-zero gradient, and counts of the groups kept and left out.

    `dropped` are the groups that dynamic sampling rejected: they do not enter the loss, and are kept in
    `Batch.left_out` only to compare the log-probs of engine and trainer.
    """
    zeros = [[0.0] * len(group.episodes) for group in dropped]
    no_weights = [_clean(sample_group(group, zero_G, zero_G)) for group, zero_G in zip(dropped, zeros, strict=True)]
    if not groups:
        return Batch(groups=(), left_out=tuple(no_weights)), dict.fromkeys(COUNTS, 0.0)
    penalties = [[length_penalty(episode, settings, max_new_tokens) for episode in group.episodes] for group in groups]
    # weights count ALL completions: in a group without signal these have zero advantage, so leaving the group out saves
    # its forward and backward pass without changing the gradient
    weights = _weights(groups, settings, max_new_tokens)
    samples = [
        sample_group(group, penalty_G, weight_G, settings.turn_discount)
        for group, penalty_G, weight_G in zip(groups, penalties, weights, strict=True)
    ]
    # groups differ in size if sessions have failed
    rewards = [[sample.reward for sample in group.samples] for group in samples]
    signal_P = [_differs(rewards_G) for rewards_G in rewards]
    kept = _kept(rewards, signal_P, settings)
    left_out = [_clean(samples[index]) for index in sorted(set(range(len(groups))) - set(kept))]
    batch = Batch(groups=tuple(samples[index] for index in kept), left_out=(*left_out, *no_weights))
    if settings.old_logprobs == "engine":
        batch = with_old_logprobs(batch, [sample.rollout_logprobs_T for sample in batch.samples])
    with_signal = float(sum(signal_P))
    counts = dict(zip(COUNTS, (with_signal, len(groups) - with_signal, len(groups) - len(kept)), strict=True))
    if _all_single(rewards):
        # "signal" compares episodes of one group, so it is not defined in groups of one
        counts = {}
    if settings.overlong is not None:
        counts["reward/overlong"] = float(np.mean(np.concatenate(penalties)))
    if settings.mask_truncated:
        counts["episodes/masked"] = float(sum(episode.was_truncated for group in groups for episode in group.episodes))
    return batch, counts


def length_penalty(episode: Episode, settings: Algorithm, max_new_tokens: int) -> float:
    """The term (0 or less) that `algorithm.overlong` adds to an episode's reward."""
    if settings.overlong is None:
        return 0.0
    return overlong_penalty(
        max(len(turn.completion.token_ids_T) for turn in episode.tokens),
        max_tokens=max_new_tokens,
        buffer_tokens=settings.overlong.buffer_frac * max_new_tokens,
        factor=settings.overlong.penalty_factor,
    )


def _weights(groups: Sequence[Group], settings: Algorithm, max_new_tokens: int) -> list[list[float]]:
    """Loss weight of each episode's tokens, by group, normalised over the whole step (`algorithms.aggregation`)."""
    episodes = [episode for group in groups for episode in group.episodes]
    masked = [settings.mask_truncated and episode.was_truncated for episode in episodes]
    # masked completions still count in means over completions, but add no tokens to means over tokens
    lengths = [0 if out else episode.num_action_tokens for episode, out in zip(episodes, masked, strict=True)]
    weights = sample_weights(settings.aggregation, lengths, max_response_tokens=max_new_tokens)
    weight = iter(np.where(masked, 0.0, weights).tolist())
    return [[next(weight) for _ in group.episodes] for group in groups]


def _kept(rewards: Sequence[Sequence[float]], signal_P: Sequence[bool], settings: Algorithm) -> list[int]:
    """Indices of the groups to train on: those with signal, and up to `max_groups_without_signal` of the others."""
    # groups of equal rewards still have a gradient if the baseline is not the group's mean (whitening over the batch, a
    # value function, groups of one), or if a term of the loss acts on every token
    if _all_single(rewards) or settings.advantage.name in WHITENED or settings.kl or settings.augmentation:
        return list(range(len(rewards)))
    silent = [index for index, differs in enumerate(signal_P) if not differs]
    worst_first = sorted(silent, key=lambda index: torch.tensor(rewards[index]).mean().item())
    # Groups without signal only contribute the entropy bonus. Lowest rewards first, since failing groups need more
    # exploration than successful ones. Sorted back into step order, so that every minibatch has a share of both.
    wanted = [*(set(range(len(rewards))) - set(silent)), *worst_first[: settings.max_groups_without_signal]]
    return sorted(wanted)


def _all_single(groups: Sequence[Sequence[object]]) -> bool:
    """True in a run with one episode per prompt."""
    return max(map(len, groups)) == 1


def _differs(rewards_G: Sequence[float]) -> bool:
    return bool(has_signal(torch.tensor([rewards_G])))


def sample_group(
    group: Group, penalties: Sequence[float], weights: Sequence[float], turn_discount: float = 1.0
) -> SampleGroup:
    """The samples of a scored group, with these penalties (0 or less) added to the rewards, and these loss weights."""
    samples = [
        _sample(_penalised(episode, penalty), weight, turn_discount)
        for episode, penalty, weight in zip(group.episodes, penalties, weights, strict=True)
    ]
    return SampleGroup(
        prompt=group.prompt, samples=tuple(samples), task_id=group.episodes[0].task.id, masked=group.masked
    )


def _penalised(episode: Episode, penalty: float) -> Episode:
    """The episode with a penalty added to its reward, and to the last turn's reward if rewards are per turn."""
    score = episode.score
    turns = (*score.turns[:-1], score.turns[-1] + penalty) if score.turns else ()
    return replace(episode, score=replace(score, reward=score.reward + penalty, turns=turns))


def _sample(episode: Episode, weight: float, turn_discount: float) -> Sample:
    turns, rewards = episode.tokens, episode.score.turns
    # rewards per turn are summed over turns k = 0, 1, ... as turn_discount^k r_k
    discounted = sum(turn_discount**turn * reward for turn, reward in enumerate(rewards))
    return Sample(
        token_ids_T=_joined(turns, lambda turn: turn.observation.token_ids_L, lambda turn: turn.completion.token_ids_T),
        mask_T=_joined(
            turns,
            lambda turn: np.zeros(turn.observation.num_tokens, dtype=np.bool_),
            lambda turn: np.ones(len(turn.completion.token_ids_T), dtype=np.bool_),
        ),
        rollout_logprobs_T=_joined(
            turns,
            lambda turn: np.zeros(turn.observation.num_tokens, dtype=np.float32),
            lambda turn: turn.completion.logprobs_T,
        ),
        reward=discounted if rewards else episode.score.reward,
        turn_rewards=rewards,
        weight=weight,
        images=tuple(image for turn in turns[1:] for image in turn.observation.images),
        completion_ids=tuple(turn.completion.id for turn in turns),
        versions=tuple(turn.completion.version for turn in turns),
        is_noisy=turns[0].is_noisy,
    )


def _joined(
    turns: Sequence[TurnTokens],
    of_observation: Callable[[TurnTokens], NDArray[Value]],
    of_completion: Callable[[TurnTokens], NDArray[Value]],
) -> NDArray[Value]:
    """One value per token of all turns, without the prompt."""
    first, *later = turns
    if not later:
        return of_completion(first)
    rest = (part(turn) for turn in later for part in (of_observation, of_completion))
    return np.concatenate([of_completion(first), *rest])


def with_old_logprobs(batch: Batch, logprobs: Sequence[NDArray[np.float32]]) -> Batch:
    """The batch with old log-probs, the denominator of the loss's ratio: one array [T] per sample, in order."""
    values = iter(logprobs)
    return replace_samples(batch, lambda sample: replace(sample, old_logprobs_T=next(values)))


def has_old_logprobs(batch: Batch) -> bool:
    """True if the samples already hold old log-probs."""
    return any(sample.old_logprobs_T is not None for sample in batch.samples)


def old_logprobs(batch: Batch) -> list[NDArray[np.float32]]:
    """The old log-probs [T] of all samples that have them."""
    return [sample.old_logprobs_T for sample in batch.samples if sample.old_logprobs_T is not None]


def with_reference_logprobs(batch: Batch, logprobs: Sequence[NDArray[np.float32]]) -> Batch:
    """The batch with the reference model's log-probs: one array [T] per sample, in order."""
    values = iter(logprobs)
    return replace_samples(batch, lambda sample: replace(sample, reference_logprobs_T=next(values)))


def with_masked_logprobs(batch: Batch, logprobs: Sequence[NDArray[np.float32]]) -> Batch:
    """The batch with the policy's log-probs on masked pictures: one array [T] per sample, in order."""
    values = iter(logprobs)
    return replace_samples(batch, lambda sample: replace(sample, masked_logprobs_T=next(values)))


def without_masked(batch: Batch) -> Batch:
    """The batch with only its clean pictures."""
    return replace(batch, groups=tuple(map(_clean, batch.groups)))


def _clean(group: SampleGroup) -> SampleGroup:
    return replace(group, masked=None)


def on_masked(batch: Batch) -> Batch:
    """The batch with only its masked pictures."""
    groups = (replace(group, prompt=group.masked or group.prompt, masked=None) for group in batch.groups)
    return replace(batch, groups=tuple(groups))


def with_values(batch: Batch, values: Sequence[NDArray[np.float32]]) -> Batch:
    """The batch with the value function's predictions: one array [T] per sample, in order."""
    of_samples = iter(values)
    return replace_samples(batch, lambda sample: replace(sample, values_T=next(of_samples)))


def replace_samples(batch: Batch, change: Callable[[Sample], Sample]) -> Batch:
    """The batch with `change` applied to every sample, in order."""
    groups = (replace(group, samples=tuple(map(change, group.samples))) for group in batch.groups)
    return replace(batch, groups=tuple(groups))


def episode_metrics(groups: Sequence[Group]) -> Metrics:
    """Mean rewards, accuracies and lengths over a step's episodes, also by question type and by turn if several."""
    episodes = [episode for group in groups for episode in group.episodes]
    lengths = [episode.num_action_tokens for episode in episodes]
    metrics = {
        "reward": _mean([episode.score.reward for episode in episodes]),
        "accuracy": _mean([episode.score.accuracy for episode in episodes]),
        "response_tokens_mean": _mean(lengths),
        "response_tokens_max": float(max(lengths)),
        "truncated_frac": _mean([episode.was_truncated for episode in episodes]),
    }
    rewards = [[episode.score.reward for episode in group.episodes] for group in groups]
    if not _all_single(rewards):
        metrics["groups/without_signal_frac"] = _mean([not _differs(rewards_G) for rewards_G in rewards])
    for name in sorted({name for episode in episodes for name in episode.score.parts}):
        metrics[f"reward/{name}"] = _mean(
            [episode.score.parts[name] for episode in episodes if name in episode.score.parts]
        )
    metrics |= _image_metrics(episodes, "")
    if any(len(episode.turns) > 1 for episode in episodes):
        metrics |= turn_metrics(episodes)
    kinds = sorted({episode.task.kind for episode in episodes})
    for kind in kinds if len(kinds) > 1 else []:
        of_kind = [episode for episode in episodes if episode.task.kind == kind]
        metrics[f"accuracy/train/{kind}"] = _mean([episode.score.accuracy for episode in of_kind])
        metrics |= _image_metrics(of_kind, f"/{kind}")
    return metrics


def staleness(groups: Sequence[Group], version: int) -> Metrics:
    """Policy steps between the version that sampled each turn and this version: mean and maximum over turns."""
    turns = [turn for group in groups for episode in group.episodes for turn in episode.tokens]
    steps = [version - turn.completion.version for turn in turns]
    return {"staleness/mean": _mean(steps), "staleness/max": float(max(steps))}


def _image_metrics(episodes: Sequence[Episode], end: str) -> Metrics:
    """Mean of each named part of each image's reward, over the episodes that have that part."""
    values: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        for place, parts in enumerate(episode.score.image_parts, start=1):
            for name, value in parts.items():
                values[f"reward/image_{place}/{name}{end}"].append(value)
    return {key: _mean(values[key]) for key in sorted(values)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
