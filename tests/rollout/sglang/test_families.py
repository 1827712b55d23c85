"""A family that the whole suite does not run: its log-probs, before and after a push of other weights."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.rollout.engine_suite import TOLERANCE, ask, prompts_of
from tests.rollout.sglang.serving import serving


def test_logprobs_of_qwen2_vl_equal_transformers_before_and_after_a_push(tmp_path: Path) -> None:
    with serving("qwen2_vl", tmp_path / "model") as served:
        for version in (8, 9):
            requests = [ask(f"{version}/{place}", prompt, n=2) for place, prompt in enumerate(prompts_of(served.parts))]
            for request, completions in zip(requests, served.generate(*requests), strict=True):
                assert served.largest_difference(request, completions) < TOLERANCE
            with torch.no_grad():
                for parameter in served.parts.network.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.02)
            served.push(version)
