"""Qwen3.5 in vLLM's CPU build, whose kernels of delta nets are for bfloat16 and heads of 64 or more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fovea.config.model import Model
from fovea.models.tiny import TinyParts
from fovea.rollout.vllm.arguments import check_delta_nets
from fovea.types import Completion, Request
from fovea_gym.errors import ConfigError
from tests.reference import reference_logprobs
from tests.rollout.engine_suite import ask, prompts_of
from tests.rollout.engines.serving import serving
from tests.tiny_models import tiny

LIMIT = 0.05
"""Of the mean difference of log-probs; that of transformers in bfloat16 is .01 to .03."""


@torch.no_grad()
def change(network: nn.Module, by: float) -> None:
    """Add noise to all weights, and round them to bfloat16."""
    for weight in network.parameters():
        weight.copy_((weight + torch.randn_like(weight) * by).bfloat16())


@torch.no_grad()
def mean_difference(parts: TinyParts, request: Request, completions: Sequence[Completion]) -> float:
    expected = [reference_logprobs(parts, request.prompt, each.token_ids_T) for each in completions]
    found = torch.from_numpy(np.concatenate([each.logprobs_T for each in completions]))
    return float((found - torch.cat(expected)).abs().mean())


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_logprobs_are_those_of_the_weights_of_the_last_weight_sync(family: str, tmp_path: Path) -> None:
    parts = tiny(family, hidden_size=256)
    change(parts.network, 0)
    with serving(parts, tmp_path / "model", dtype="bfloat16") as served:
        for version in (1, 2):
            served.sync(version)
            requests = [ask(f"{version}/{place}", prompt, n=2) for place, prompt in enumerate(prompts_of(parts))]
            sampled = list(zip(requests, served.generate(*requests), strict=True))
            assert max(mean_difference(parts, *each) for each in sampled) < LIMIT
            change(parts.network, 0.02)
            assert min(mean_difference(parts, *each) for each in sampled) > 4 * LIMIT


@pytest.mark.parametrize(
    ("settings", "takes_adapters", "message"),
    [
        ({}, False, r"model.dtype=float32, but x has delta nets, .* in bfloat16 only; set model.dtype=bfloat16"),
        ({"dtype": "bfloat16"}, True, r"enable_lora=true, but x has delta nets, .*; set .*enable_lora=false"),
    ],
)
def test_what_vllm_does_not_run_is_refused(settings: dict[str, str], takes_adapters: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_delta_nets(Model(path="x", **settings), on_cpu=True, takes_adapters=takes_adapters)
