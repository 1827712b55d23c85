"""Dropout of LoRA adapters in an update, and in nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fovea.config.run import Config
from fovea.train.base import Needs
from fovea.train.torch.policy import TorchPolicy, make_policy
from fovea.wiring.engine import make_tape
from fovea.wiring.model import make_vlm
from tests.policies import make_batch, weights_of
from tests.saved import save_policy
from tests.tiny_models import tiny


def settings(dropout: float) -> Config:
    return Config.model_validate(
        {
            "model": {"tiny": {}, "lora": {"rank": 4, "dropout": dropout}},
            "train": {"learning_rate": 1e-2, "lr_warmup_steps": 0, "plain_update_every_steps": 1},
        }
    )


def policy_of(dropout: float) -> TorchPolicy:
    network = tiny("qwen3_vl").network.eval()
    policy = make_policy(settings(dropout), make_vlm(settings(dropout), network, banned_ids=()))
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "lora_B" in name:  # zero at the start: dropping what it is multiplied with would change nothing
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return policy


def stepped(policy: TorchPolicy, seed: int = 0) -> dict[str, float]:
    config = settings(0.5)
    batch = make_batch(tiny("qwen3_vl"), seed)
    return policy.update(policy.compute_logprobs(batch, Needs.of(config.algorithm, dropout=config.model.has_dropout)))


def test_old_logprobs_are_those_that_sampled() -> None:
    """The ratio is of the dropped-out network to the whole one, and what the engine is compared with is whole."""
    plain, dropped = policy_of(0.0), policy_of(0.5)
    batch = make_batch(tiny("qwen3_vl"))
    needs = Needs.of(settings(0.5).algorithm, dropout=settings(0.5).model.has_dropout)
    assert needs.old_logprobs
    for ours, theirs in zip(
        dropped.compute_logprobs(batch, needs).samples, plain.compute_logprobs(batch, needs).samples, strict=True
    ):
        np.testing.assert_allclose(ours.old_logprobs_T, theirs.old_logprobs_T, atol=1e-5)
    with_it, without = stepped(dropped), stepped(plain)
    assert with_it["mismatch/kl"] == pytest.approx(without["mismatch/kl"], rel=1e-5)
    assert without["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert abs(with_it["ratio_mean"] - 1) > 1e-3


def test_a_resumed_run_drops_the_same_inputs(tmp_path: Path) -> None:
    """Whatever else has drawn from torch's generator, which an update leaves as it was."""
    whole, resumed = policy_of(0.5), policy_of(0.5)
    stepped(whole)
    save_policy(whole, tmp_path)
    state = torch.get_rng_state()
    stepped(whole, 1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(7)
    resumed.load(tmp_path)
    stepped(resumed, 1)
    for (name, one), (_, other) in zip(weights_of(whole).items(), weights_of(resumed).items(), strict=True):
        assert torch.equal(one, other), name


def test_the_outputs_of_a_rollout_are_not_those_of_an_update_with_dropout() -> None:
    vlm = make_vlm(settings(0.5), tiny("qwen3_vl").network, banned_ids=())
    assert make_tape(settings(0.5), vlm) is None
    assert make_tape(settings(0.0), vlm) is not None
