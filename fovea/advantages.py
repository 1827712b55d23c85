"""From rewards to the advantage of every action, once the log-probs and values that it takes are there.

Axes: `P` groups, `G` samples of a group, `B` samples, `T` tokens of the longest completion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.algorithms.advantage import dr_grpo, grpo, reinforce_plus_plus, rloo
from fovea.algorithms.gae import gae, whiten
from fovea.algorithms.kl import ESTIMATORS
from fovea.algorithms.value_loss import explained_variance
from fovea.config.run import Algorithm
from fovea.samples import replace_samples
from fovea.types import Batch, Metrics, Sample

OF_EPISODES: Mapping[str, Callable[[Tensor], Tensor]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
"""By `algorithm.advantage`: [P, G] rewards to [P, G] advantages, the same for every token of a completion."""


def with_advantages(batch: Batch, settings: Algorithm, kl_coef: float) -> tuple[Batch, Metrics]:
    """The batch with advantages, and with returns where there is a value function; `kl_coef` is the step's own.

    A KL in the reward is taken off token by token: where it falls for gae and reinforce++, which judge actions; in sum
    for the others, which judge completions.
    """
    if not batch.groups:
        return batch, {}
    penalties = _kl_penalties(batch, settings, kl_coef)
    if settings.needs_values:
        batch, metrics = _by_values(batch, penalties, settings)
    elif settings.advantage == "reinforce++":
        batch, metrics = _by_actions(batch, penalties), {}
    else:
        batch, metrics = _by_groups(batch, penalties, OF_EPISODES[settings.advantage]), {}
    return batch, metrics | _statistics(batch) | _kl_metrics(batch, penalties, settings, kl_coef)


def _kl_penalties(batch: Batch, settings: Algorithm, kl_coef: float) -> list[NDArray[np.float32]]:
    """[T] of each sample, what the KL takes off the reward at each token; zeros where it is not in the reward."""
    if settings.kl_in != "reward" or not settings.kl_coef:
        return [np.zeros(len(sample.token_ids_T), dtype=np.float32) for sample in batch.samples]
    return [kl_coef * _kl_to_reference(sample, settings) for sample in batch.samples]


def _kl_to_reference(sample: Sample, settings: Algorithm) -> NDArray[np.float32]:
    assert sample.old_logprobs_T is not None, "a KL in the reward needs the policy's log-probs from before the update"
    assert sample.reference_logprobs_T is not None, "and those of the reference"
    old_T, reference_T = torch.from_numpy(sample.old_logprobs_T), torch.from_numpy(sample.reference_logprobs_T)
    kl_T: NDArray[np.float32] = ESTIMATORS[settings.kl_estimator](old_T, reference_T).numpy()
    return kl_T


def _by_groups(
    batch: Batch, penalties: Sequence[NDArray[np.float32]], advantages_of: Callable[[Tensor], Tensor]
) -> Batch:
    """One advantage per completion, against the others of its group."""
    rewards = [sample.reward - float(kl_T.sum()) for sample, kl_T in zip(batch.samples, penalties, strict=True)]
    advantages_B = advantages_of(torch.tensor(rewards).view(len(batch.groups), -1)).flatten().tolist()
    values = iter(advantages_B)

    def change(sample: Sample) -> Sample:
        return replace(sample, advantages_T=np.full(len(sample.token_ids_T), next(values), dtype=np.float32))

    return replace_samples(batch, change)


def _by_actions(batch: Batch, penalties: Sequence[NDArray[np.float32]]) -> Batch:
    """An advantage for every token, against all others of the step."""
    rewards = [_token_rewards(sample, kl_T) for sample, kl_T in zip(batch.samples, penalties, strict=True)]
    returns_BT, mask_BT = _padded([np.cumsum(x_T[::-1])[::-1].copy() for x_T in rewards]), _mask(rewards)
    advantages = iter(_unpadded(reinforce_plus_plus(returns_BT, mask_BT), rewards))
    return replace_samples(batch, lambda sample: replace(sample, advantages_T=next(advantages)))


def _by_values(batch: Batch, penalties: Sequence[NDArray[np.float32]], settings: Algorithm) -> tuple[Batch, Metrics]:
    """An advantage for every token, by GAE and whitened over the step; and the returns that the values should be."""
    samples = batch.samples
    values = [_values(sample) for sample in samples]
    rewards = [_token_rewards(sample, kl_T) for sample, kl_T in zip(samples, penalties, strict=True)]
    mask_BT, values_BT = _mask(values), _padded(values)
    advantages_BT, returns_BT = gae(
        _padded(rewards), values_BT, mask_BT, gamma=settings.gamma, gae_lambda=settings.gae_lambda
    )
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
    """The reward of the episode sits on its last action."""
    rewards_T = -kl_T
    rewards_T[-1] += sample.reward
    return rewards_T


def _padded(rows: Sequence[NDArray[np.float32]]) -> Tensor:
    """[B, T], zeros at the end of shorter rows."""
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True)


def _mask(rows: Sequence[NDArray[np.float32]]) -> Tensor:
    """[B, T], True where a row has a token."""
    return _padded([np.ones(len(row_T), dtype=np.float32) for row_T in rows]).bool()


def _unpadded(rows_BT: Tensor, like: Sequence[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
    return [row_T[: len(short)].numpy() for row_T, short in zip(rows_BT, like, strict=True)]


def _statistics(batch: Batch) -> Metrics:
    """Over the actions trained on."""
    advantages_A = np.concatenate([sample.advantages_T for sample in batch.samples if sample.advantages_T is not None])
    return {
        "advantage/mean": float(advantages_A.mean()),
        "advantage/std": float(advantages_A.std()),
        "advantage/max_abs": float(np.abs(advantages_A).max()),
    }


def _kl_metrics(batch: Batch, penalties: Sequence[NDArray[np.float32]], settings: Algorithm, kl_coef: float) -> Metrics:
    if settings.kl_in != "reward" or not settings.kl_coef:
        return {}
    kl_A = np.concatenate([_kl_to_reference(sample, settings) for sample in batch.samples])
    off = [float(kl_T.sum()) for kl_T in penalties]
    return {"kl/reward": float(kl_A.mean()), "kl/coef": kl_coef, "reward_kl": sum(off) / len(off)}
