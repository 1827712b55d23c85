"""Advantage estimation for a batch: turns rewards, KL penalties and values into per-token advantages and returns.

The batch must already contain the old and reference log-probs and the values that the algorithm needs.

Axes: `P` groups, `G` samples of a group, `B` samples, `T` tokens of the longest completion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.algorithms.advantage import dr_grpo, grpo, reinforce_plus_plus, reinforce_plus_plus_baseline, rloo
from fovea.algorithms.gae import gae, turn_gae, whiten
from fovea.algorithms.kl import ESTIMATORS, k3
from fovea.algorithms.masked_pictures import vppo_weights
from fovea.algorithms.value_loss import explained_variance
from fovea.config.algorithm import (
    Algorithm,
    DrGrpo,
    Gae,
    Grpo,
    KlInReward,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    Rloo,
)
from fovea.config.augmentations import Vppo
from fovea.samples import replace_samples
from fovea.types import Batch, Metrics, Sample

GROUP_ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
"""Group-baseline estimators by `algorithm.advantage.name`: rewards [P, G] -> advantages [P, G], row by row."""


def with_advantages(batch: Batch, settings: Algorithm, kl_coef: float) -> tuple[Batch, Metrics]:
    """The batch with advantages (and returns, for GAE), and metrics of advantages, values and KL penalty.

    `kl_coef` is the current KL coefficient. With `kl=reward`, gae and reinforce++ subtract the penalty per token; the
    group estimators, which rate whole completions, subtract its sum over the completion. Rewards per turn are summed
    for the group estimators (`Sample.reward`); in gae and reinforce++, each is on the last action of its turn.
    """
    if not batch.groups:
        return batch, {}
    penalties = _kl_penalties(batch, settings, kl_coef)
    match settings.advantage:
        case Gae() as advantage:
            batch, metrics = _by_values(batch, penalties, advantage, settings.turn_discount)
        case ReinforcePlusPlusBaseline():
            batch, metrics = _by_groups(batch, penalties, partial(_whitened, batch)), {}
        case ReinforcePlusPlus():
            batch, metrics = _by_actions(batch, penalties, settings.turn_discount), {}
        case Grpo() | DrGrpo() | Rloo() as advantage:
            batch, metrics = _by_groups(batch, penalties, partial(_each, GROUP_ESTIMATORS[advantage.name])), {}
    if isinstance(settings.augmentation, Vppo):
        batch = _by_dependence(batch, settings.augmentation)
    return batch, metrics | _statistics(batch) | _kl_metrics(batch, penalties, settings, kl_coef)


def _by_dependence(batch: Batch, settings: Vppo) -> Batch:
    """VPPO: scale each completion's advantages, and set them to 0 at the tokens that depend least on the picture."""
    samples = batch.samples
    dependence = [_dependence(sample) for sample in samples]
    weights = vppo_weights(
        _padded(dependence), _mask(batch), token_share=settings.token_share, min_scale=settings.min_scale
    )
    factors = iter(_unpadded(weights.kept_BT * weights.scales_B[:, None], dependence))

    def change(sample: Sample) -> Sample:
        assert sample.advantages_T is not None, "VPPO runs after the advantages are computed"
        return replace(sample, advantages_T=sample.advantages_T * next(factors))

    return replace_samples(batch, change)


def _dependence(sample: Sample) -> NDArray[np.float32]:
    """How much each token depends on the picture, [T]."""
    assert sample.old_logprobs_T is not None, "vppo needs the policy's log-probs from before the update"
    assert sample.masked_logprobs_T is not None, "vppo needs the policy's log-probs on the masked picture"
    clean_T, masked_T = torch.from_numpy(sample.old_logprobs_T), torch.from_numpy(sample.masked_logprobs_T)
    found_T: NDArray[np.float32] = k3(clean_T, masked_T).numpy()
    return found_T


def _kl_penalties(batch: Batch, settings: Algorithm, kl_coef: float) -> list[NDArray[np.float32]]:
    """Per-token KL penalties [T] of each sample, to subtract from the reward; zeros unless `kl=reward`."""
    kl = settings.kl
    if not isinstance(kl, KlInReward):
        return [np.zeros(len(sample.token_ids_T), dtype=np.float32) for sample in batch.samples]
    return [kl_coef * _kl_to_reference(sample, kl) * sample.mask_T for sample in batch.samples]


def _kl_to_reference(sample: Sample, settings: KlInReward) -> NDArray[np.float32]:
    assert sample.old_logprobs_T is not None, "a KL in the reward needs the policy's log-probs from before the update"
    assert sample.reference_logprobs_T is not None, "a KL in the reward needs the reference model's log-probs"
    old_T, reference_T = torch.from_numpy(sample.old_logprobs_T), torch.from_numpy(sample.reference_logprobs_T)
    kl_T: NDArray[np.float32] = ESTIMATORS[settings.estimator](old_T, reference_T).numpy()
    return kl_T


def _by_groups(
    batch: Batch, penalties: Sequence[NDArray[np.float32]], advantages_of: Callable[[Sequence[Tensor]], Tensor]
) -> Batch:
    """Give all tokens of a completion the advantage [B] that `advantages_of` makes of each group's rewards [G]."""
    # subtract the penalty before computing the baseline, so that the baseline cancels the group's mean KL
    rewards = [sample.reward - float(kl_T.sum()) for sample, kl_T in zip(batch.samples, penalties, strict=True)]
    values = iter(advantages_of(torch.tensor(rewards).split(_sizes(batch))).tolist())

    def change(sample: Sample) -> Sample:
        return replace(sample, advantages_T=np.where(sample.mask_T, np.float32(next(values)), np.float32(0)))

    return replace_samples(batch, change)


def _each(estimator: Callable[[Tensor], Tensor], rewards: Sequence[Tensor]) -> Tensor:
    """The estimator's advantages [B], computed group by group, since failed sessions make groups differ in size."""
    return torch.cat([estimator(rewards_G[None])[0] for rewards_G in rewards])


def _whitened(batch: Batch, rewards: Sequence[Tensor]) -> Tensor:
    """Advantages [B] of reinforce++_baseline."""
    lengths = torch.tensor([int(sample.mask_T.sum()) for sample in batch.samples]).split(_sizes(batch))
    most = max(map(len, rewards))
    # smaller groups are padded with episodes of mean reward and without tokens, which do not affect other advantages
    rewards_PG = torch.stack([torch.cat([x_G, x_G.mean().expand(most - len(x_G))]) for x_G in rewards])
    lengths_PG = torch.stack([torch.nn.functional.pad(x_G, (0, most - len(x_G))) for x_G in lengths])
    advantages_PG = reinforce_plus_plus_baseline(rewards_PG, lengths_PG)
    return torch.cat([row_G[: len(x_G)] for row_G, x_G in zip(advantages_PG, rewards, strict=True)])


def _sizes(batch: Batch) -> list[int]:
    return [len(group.samples) for group in batch.groups]


def _by_actions(batch: Batch, penalties: Sequence[NDArray[np.float32]], turn_discount: float) -> Batch:
    """REINFORCE++ advantages per token, with a batch-wide baseline."""
    rewards = [_token_rewards(sample, kl_T) for sample, kl_T in zip(batch.samples, penalties, strict=True)]
    returns = [
        _returns(rewards_T, sample.turn_ends, turn_discount)
        for rewards_T, sample in zip(rewards, batch.samples, strict=True)
    ]
    advantages = iter(_unpadded(reinforce_plus_plus(_padded(returns), _mask(batch)), rewards))
    return replace_samples(batch, lambda sample: replace(sample, advantages_T=next(advantages)))


def _returns(rewards_T: NDArray[np.float32], turn_ends: NDArray[np.intp], turn_discount: float) -> NDArray[np.float32]:
    """Return of each token, [T]: its reward plus all later rewards, discounted by `turn_discount` per later turn."""
    of_turns: list[NDArray[np.float32]] = []
    later = np.float32(0)
    for turn_T in reversed(np.split(rewards_T, turn_ends[:-1] + 1)):
        # reversed cumulative sum that starts from the return of the next turn
        of_turns.append(np.cumsum(np.append(turn_discount * later, turn_T[::-1]))[:0:-1])
        later = of_turns[-1][0]
    return np.concatenate(of_turns[::-1])


def _by_values(
    batch: Batch, penalties: Sequence[NDArray[np.float32]], settings: Gae, turn_discount: float
) -> tuple[Batch, Metrics]:
    """GAE advantages per token, over tokens or turns, whitened over the batch; returns are the value targets."""
    samples = batch.samples
    values = [_values(sample) for sample in samples]
    rewards = [_token_rewards(sample, kl_T) for sample, kl_T in zip(samples, penalties, strict=True)]
    mask_BT, values_BT = _mask(batch), _padded(values)
    estimator = gae
    if settings.turn_lambda is not None:
        estimator = partial(turn_gae, turn_gamma=turn_discount, turn_lambda=settings.turn_lambda)
    advantages_BT, returns_BT = estimator(
        _padded(rewards), values_BT, mask_BT, gamma=settings.gamma, gae_lambda=settings.gae_lambda
    )
    # only the advantages are whitened: the returns are regression targets, in units of the reward
    advantages = _unpadded(whiten(advantages_BT, mask_BT), values)
    returns = _unpadded(returns_BT, values)
    metrics = {
        "value/mean": float(values_BT[mask_BT].mean()),
        "return/mean": float(returns_BT[mask_BT].mean()),
        "explained_variance": explained_variance(values_BT[mask_BT], returns_BT[mask_BT]),
    }
    pairs = iter(zip(advantages, returns, strict=True))

    def change(sample: Sample) -> Sample:
        advantages_T, returns_T = next(pairs)
        return replace(sample, advantages_T=advantages_T, returns_T=returns_T)

    return replace_samples(batch, change), metrics


def _values(sample: Sample) -> NDArray[np.float32]:
    assert sample.values_T is not None, "GAE needs the values from before the update"
    return sample.values_T


def _token_rewards(sample: Sample, kl_T: NDArray[np.float32]) -> NDArray[np.float32]:
    """Per-token rewards [T]: minus the KL penalty, plus each turn's or the episode's reward on its last token."""
    rewards_T = -kl_T
    if sample.turn_rewards:
        rewards_T[sample.turn_ends] += np.array(sample.turn_rewards, dtype=np.float32)
    else:
        rewards_T[-1] += sample.reward
    return rewards_T


def _padded(rows: Sequence[NDArray[np.float32] | NDArray[np.bool_]]) -> Tensor:
    """Rows padded on the right with zeros, [B, T]."""
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True)


def _mask(batch: Batch) -> Tensor:
    """Action mask [B, T]: False at padding and at the environment's tokens."""
    return _padded([sample.mask_T for sample in batch.samples])


def _unpadded(rows_BT: Tensor, like: Sequence[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
    return [row_T[: len(short)].numpy() for row_T, short in zip(rows_BT, like, strict=True)]


def _statistics(batch: Batch) -> Metrics:
    """Mean, standard deviation and largest absolute value of the advantages over all action tokens."""
    given = [(sample.advantages_T, sample.mask_T) for sample in batch.samples]
    advantages_A = np.concatenate([values_T[mask_T] for values_T, mask_T in given if values_T is not None])
    return {
        "advantage/mean": float(advantages_A.mean()),
        "advantage/std": float(advantages_A.std()),
        "advantage/max_abs": float(np.abs(advantages_A).max()),
    }


def _kl_metrics(batch: Batch, penalties: Sequence[NDArray[np.float32]], settings: Algorithm, kl_coef: float) -> Metrics:
    kl = settings.kl
    if not isinstance(kl, KlInReward):
        return {}
    kl_A = np.concatenate([_kl_to_reference(sample, kl)[sample.mask_T] for sample in batch.samples])
    off = [float(kl_T.sum()) for kl_T in penalties]
    return {"kl/reward": float(kl_A.mean()), "kl/coef": kl_coef, "reward_kl": sum(off) / len(off)}
