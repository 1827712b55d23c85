"""Families that the whole suite does not run: their log-probs with the weights of two weight syncs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fovea.errors import EngineError
from fovea_gym.utils.event_loop import wait_for
from tests.rollout.engine_suite import ask, check_draws, check_samples_of_two_syncs, prompts_of
from tests.rollout.engines.serving import serving, stream, tiny_for
from tests.tiny_models import with_deepstack


@pytest.mark.smoke
def test_logprobs_of_qwen2_vl_equal_transformers_after_two_weight_syncs(tmp_path: Path) -> None:
    with serving(tiny_for("qwen2_vl"), tmp_path / "model") as served:
        with pytest.raises(EngineError, match="the engine has no weights; run a weight sync first"):
            served.generate(ask("early", prompts_of(served.parts)[0]))
        check_samples_of_two_syncs(served)


@torch.no_grad()
def test_logprobs_of_experts_equal_transformers_after_weight_syncs_of_all_and_of_a_layer(tmp_path: Path) -> None:
    # as many levels of vision features as in the hub's models, which SGLang takes for granted
    parts = with_deepstack(tiny_for("qwen3_vl_moe", vision_depth=4), [0, 1, 2])
    with serving(parts, tmp_path / "model") as served:
        syncs = stream(served.engine, parts)
        for version in (1, 2):
            wait_for(syncs.sync(version))
            check_draws(served, version)
            for name, weight in parts.network.named_parameters():
                weight.requires_grad_(".layers.1.mlp.experts." in name)
                weight.add_(torch.randn_like(weight) * 0.02 * weight.requires_grad)
