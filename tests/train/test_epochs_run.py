"""How many passes an update says that it made, in parts of a pass where it ended early."""

from __future__ import annotations

import pytest

from fovea.config.run import Algorithm
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
    batch = with_old_logprobs(batch, policy.annotator.logprobs(batch))
    assert policy.update(batch)["epochs_run"] == pytest.approx(expected)
