"""GLM-4.1V in vLLM, whose decoder has gate and up in one weight and whose tower fuses them."""

from __future__ import annotations

from pathlib import Path

import torch

from fovea.models.plain import PlainVLM
from fovea_tools.families.tiny import save_tiny_kind
from tests.hub_models import Loaded, assert_scored
from tests.rollout.engine_suite import ask
from tests.rollout.engines.serving import serving
from tests.tiny_models import CORPUS


@torch.no_grad()
def test_logprobs_equal_transformers_after_two_weight_syncs(tmp_path: Path) -> None:
    parts = Loaded.of(save_tiny_kind("glm4v", tmp_path / "files", CORPUS))
    with serving(parts, tmp_path / "model") as served:
        for version in (1, 2):
            served.sync(version)
            requests = [ask(f"{version}/{place}", prompt, n=2) for place, prompt in enumerate(parts.prompts)]
            vlm = PlainVLM(parts.network, parts.processor.banned_ids)
            assert_scored(vlm, parts.prompts, served.generate(*requests))
            for weight in parts.network.parameters():
                weight.add_(torch.randn_like(weight) * 0.02)
