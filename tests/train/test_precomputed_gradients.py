"""Updates whose head makes gradients with its logits, against updates that compute the logits a second time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fovea.config.algorithm import Algorithm
from fovea.train.loss import can_precompute_gradients
from fovea.train.torch import passes
from fovea.types import Batch, Metrics
from tests.policies import batch_of, gradients_and_metrics, make_batch, make_policy, update_gradients
from tests.reference import largest_relative_difference
from tests.tiny_models import tiny
from tests.train.ppo_policies import PPO, ppo_policy, scored

GRADIENT_TOLERANCE = 1e-5
IN_CHUNKS = {"logits_mib": 0.005}
"""Of four actions of the tiny model."""
OF_COMPLETIONS = {"importance_sampling_fix": True, "importance_sampling_level": "sequence"}
LOSSES: dict[str, dict[str, object]] = {
    "clip": {},
    "dual clip": {"loss": {"name": "clip", "dual_clip": 1.5}, "entropy_coef": 0.1},
    "cispo": {"loss": {"name": "cispo"}, "entropy_coef": 0.1},
    "sapo": {"loss": {"name": "sapo"}},
    "gspo": {"loss": {"name": "gspo"}, "entropy_coef": 0.1},
    "weighed": {"importance_sampling_fix": True, "kl": {"coef": 0.3, "estimator": "k3"}},
    "weighed by completion": OF_COMPLETIONS,
}


def update(algorithm: Algorithm, batch: Batch) -> tuple[dict[str, torch.Tensor], Metrics, int]:
    """Gradients, metrics and operations of an update in chunks."""
    policy = make_policy(tiny("qwen3_vl"), algorithm=algorithm, backend=IN_CHUNKS, lr_warmup_steps=0)
    with FlopCounterMode(display=False) as counter:
        found, metrics = gradients_and_metrics(policy, batch)
    del metrics["memory/activations_gib"]
    return found, metrics, counter.get_total_flops()


@pytest.mark.parametrize("on_policy", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("loss", LOSSES)
def test_an_update_is_that_of_a_second_pass_over_the_logits(
    loss: str, on_policy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm, batch = Algorithm.model_validate(LOSSES[loss]), batch_of(on_policy=on_policy)
    found, metrics, operations = update(algorithm, batch)
    monkeypatch.setattr(passes, "precomputed_loss_gradients", lambda *_: None)
    twin, twin_metrics, twin_operations = update(algorithm, batch)
    assert largest_relative_difference(twin, found) < GRADIENT_TOLERANCE
    assert metrics == pytest.approx(twin_metrics, rel=1e-5)
    head = tiny("qwen3_vl").network.get_output_embeddings().weight.numel()
    unequal = sum(len(sample.token_ids_T) for sample in make_batch(tiny("qwen3_vl")).samples)
    known = can_precompute_gradients(algorithm, on_policy=on_policy)
    assert twin_operations - operations == (2 * unequal * head if known else 0)


def test_gradients_are_precomputed_but_where_a_completion_has_one_ratio() -> None:
    known = {
        (loss, on_policy): can_precompute_gradients(Algorithm.model_validate(settings), on_policy=on_policy)
        for loss, settings in LOSSES.items()
        for on_policy in (True, False)
    }
    assert {case for case, is_known in known.items() if not is_known} == {
        ("gspo", False),
        ("weighed by completion", True),
    }


def test_values_of_a_shared_trunk_train_beside_them() -> None:
    found = []
    for known in (True, False):
        backend = IN_CHUNKS if known else {}
        policy = ppo_policy(tiny("qwen3_vl"), algorithm=PPO.model_copy(update={"entropy_coef": 0.1}), backend=backend)
        found.append(update_gradients(policy, scored(policy, make_batch(tiny("qwen3_vl")))))
    assert largest_relative_difference(found[1], found[0]) < GRADIENT_TOLERANCE


def test_a_minibatch_stands_for_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loss is scaled, and so are its precomputed gradients: others would be refused."""
    algorithm, batch = Algorithm(minibatches=3, max_policy_kl=None), batch_of(on_policy=False)
    found, metrics, _ = update(algorithm, batch)
    assert metrics["epochs_run"] == 1
    monkeypatch.setattr(passes, "precomputed_loss_gradients", lambda *_: None)
    assert largest_relative_difference(update(algorithm, batch)[0], found) < GRADIENT_TOLERANCE


def test_a_loss_that_is_not_finite_skips_the_update_as_ever() -> None:
    algorithm = Algorithm.model_validate({"kl": {"coef": 0.1}})
    policy = make_policy(tiny("qwen3_vl"), algorithm=algorithm, backend=IN_CHUNKS, lr_warmup_steps=0)
    batch = batch_of(on_policy=True)
    first, *others = batch.groups
    bad = replace(first.samples[0], reference_logprobs_T=np.full_like(first.samples[0].rollout_logprobs_T, np.nan))
    batch = Batch(groups=(replace(first, samples=(bad, *first.samples[1:])), *others))
    assert policy.update(batch)["updates_skipped"] == 1
