"""The plan of an update on a GPU against CUDA's own count, with a model of Qwen3-VL-2B's shape in bfloat16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from fovea.config.run import Config
from fovea.models.recompute import recompute_activations
from fovea.models.vlm import VLM
from fovea.train.torch.policy import TorchPolicy
from fovea.types import Batch, Prompt, Sample, SampleGroup
from fovea_tools.plan.plan import make_plan
from tests.tools.plan.published import QWEN3_VL_2B, folder_of

PROMPTS, SAMPLES, PROMPT_TOKENS, COMPLETION_TOKENS = 4, 4, 512, 256


def batch() -> Batch:
    ids_L, ids_T = np.full(PROMPT_TOKENS, 7), np.full(COMPLETION_TOKENS, 9)
    sample = Sample(
        token_ids_T=ids_T,
        mask_T=np.ones(len(ids_T), np.bool_),
        rollout_logprobs_T=np.full(len(ids_T), -5, np.float32),
        reward=0.0,
        weight=1e-3,
        advantages_T=np.ones(len(ids_T), np.float32),
    )
    groups = [
        SampleGroup(prompt=Prompt(token_ids_L=ids_L, unexpanded_ids_U=ids_L), samples=(sample,) * SAMPLES)
        for _ in range(PROMPTS)
    ]
    return Batch(groups=tuple(groups))


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["none", "full"])
def test_an_update_of_2b_parameters_in_bfloat16(how: str, tmp_path: Path) -> None:
    config = Config.model_validate(
        {
            "model": {"path": str(folder_of(tmp_path, QWEN3_VL_2B)), "dtype": "bfloat16"},
            "rollout": {
                "prompts_per_step": PROMPTS,
                "samples_per_prompt": SAMPLES,
                "max_new_tokens": COMPLETION_TOKENS,
            },
            "plan": {"gpu": "h100", "gpus": 1, "prompt_tokens": PROMPT_TOKENS, "images_per_prompt": 0},
            "train": {"max_tokens_per_microbatch": 4096, "gradient_checkpointing": how},
        }
    )
    with torch.device("cuda"):
        network = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**QWEN3_VL_2B)).to(torch.bfloat16)
    recompute_activations(network, config.train.gradient_checkpointing)
    policy = TorchPolicy(
        VLM(network, banned_ids=(0,)), train=config.train, algorithm=config.algorithm, temperature=1.0, max_steps=9
    )
    policy.update(batch())
    torch.cuda.reset_peak_memory_stats()
    policy.update(batch())
    update = make_plan(config).phases[1]
    # no engine runs here, whose pool of keys would stay
    planned = update.total - update.parts.get("key-value cache", 0)
    assert planned == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.15)
