"""How many passes an update says that it made, in parts of a pass where it ended early."""

from __future__ import annotations

import pytest

from fovea.config.algorithm import Algorithm
from fovea.samples import with_old_logprobs
from tests.policies import make_batch, make_policy
from tests.tiny_models import tiny


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 1),
        ({"ppo_epochs": 2}, 2),
        ({"minibatches": 3}, 1),
        ({"ppo_epochs": 2, "minibatches": 3}, 2),
        ({"ppo_epochs": 2, "minibatches": 9}, 2),  # of 3 groups there are 3
        ({"ppo_epochs": 3, "minibatches": 2, "max_policy_kl": 1e-9}, 1 / 2),  # the first step has moved the policy
    ],
    ids=str,
)
def test_optimizer_steps_count_in_passes_over_the_batch(settings: dict[str, object], expected: float) -> None:
    parts = tiny("qwen3_vl")
    policy = make_policy(parts, algorithm=Algorithm.model_validate(settings), lr_warmup_steps=0)
    batch = make_batch(parts)
    batch = with_old_logprobs(batch, policy.logprobs(batch))
    assert policy.update(batch)["epochs_run"] == pytest.approx(expected)


def test_old_logprobs_of_a_stale_engine_do_not_end_an_update_before_its_first_step() -> None:
    """.3 nats off, k3 is above the limit at once; by how much the update moves the policy is not known yet."""
    parts = tiny("qwen3_vl")
    algorithm = Algorithm(old_logprobs="engine", ppo_epochs=2, max_policy_kl=0.01)
    policy = make_policy(parts, algorithm=algorithm, lr_warmup_steps=0)
    batch = make_batch(parts)
    batch = with_old_logprobs(batch, [logprobs_T - 0.3 for logprobs_T in policy.logprobs(batch)])
    metrics = policy.update(batch)
    assert metrics["kl/policy"] > 0.01
    assert metrics["epochs_run"] == 1
