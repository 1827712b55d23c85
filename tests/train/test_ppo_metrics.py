"""What a step of PPO says of its critic, against the same numbers by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fovea.advantages import with_advantages
from fovea.config.algorithm import Algorithm, Critic, Gae
from fovea.metrics.names import undefined
from fovea.samples import with_old_logprobs, with_values
from tests.policies import make_batch
from tests.tiny_models import tiny
from tests.train.ppo_policies import logprobs_and_values, ppo_policy, with_rewards

VALUE_CLIP = 0.05


def algorithm(epochs: int) -> Algorithm:
    """Without a discount: the return of every action is the reward of its completion."""
    return Algorithm(name="ppo", ppo_epochs=epochs, advantage=Gae(critic=Critic(value_clip=VALUE_CLIP)))


@pytest.mark.parametrize("separate", [False, True])
def test_loss_clip_and_explained_variance_of_the_critic(separate: bool) -> None:
    """Of two epochs; the values that the second one sees are those that another policy has after its one."""
    policy, other = (ppo_policy(tiny("qwen3_vl"), separate=separate, algorithm=algorithm(epochs)) for epochs in (2, 1))
    batch = with_rewards(make_batch(tiny("qwen3_vl")))
    logprobs, values = logprobs_and_values(policy, batch)
    batch, metrics = with_advantages(with_values(with_old_logprobs(batch, logprobs), values), algorithm(2), 0.0)
    metrics |= policy.update(batch)
    other.update(batch)
    old, new = np.concatenate(values), np.concatenate(logprobs_and_values(other, batch)[1])
    returns = np.concatenate([np.full(len(sample.token_ids_T), sample.reward) for sample in batch.samples])
    plain = (new - returns) ** 2
    clipped = (np.clip(new, old - VALUE_CLIP, old + VALUE_CLIP) - returns) ** 2
    losses = [(old - returns) ** 2 / 2, np.maximum(plain, clipped) / 2]
    assert 0.1 < (clipped > plain).mean() < 0.9
    assert metrics["value_loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert metrics["value_clip_frac"] == pytest.approx((clipped > plain).mean() / 2)
    unexplained = (returns - old).var() / returns.var()
    assert metrics["explained_variance"] == pytest.approx(1 - unexplained, rel=1e-4)
    assert metrics["value/mean"] == pytest.approx(old.mean(), rel=1e-4)
    assert metrics["return/mean"] == pytest.approx(returns.mean(), rel=1e-4)
    assert undefined(metrics) == []
