"""Weights and cache of vLLM only: weights that it fuses, and the tokens that its cache holds."""

from __future__ import annotations

import pytest

from fovea.config.run import Config
from fovea.errors import EngineError
from fovea.rollout.vllm.engine import VllmEngine
from fovea_tools.plan.plan import make_plan
from tests.rollout.engines.on_vllm import ENGINE
from tests.rollout.engines.serving import sync, tiny_for


def test_a_weight_sync_of_half_a_fused_weight_is_refused(shared: VllmEngine) -> None:
    """q without k and v."""
    sync(shared, tiny_for("qwen3_vl", num_kv_heads=2), 20)
    with pytest.raises(EngineError, match=r"\b2 that .*k_proj\.weight"):
        shared.begin_sync({"model.language_model.layers.0.self_attn.q_proj.weight": (64, 64)})


def test_a_plan_knows_the_tokens_of_the_cache(shared: VllmEngine) -> None:
    """By the numbers that vLLM has made of `kv_cache_gib`; pages that do not fit whole are left out."""
    cache = shared.llm.vllm_config.cache_config
    assert cache.num_gpu_blocks is not None
    config = Config.model_validate(
        {
            "model": {"path": str(shared.llm.model_config.model)},
            "rollout": {"engine": {"name": "vllm"} | ENGINE.small},
            "plan": {"gpu": "cpu", "gpus": 1},
        }
    )
    room = make_plan(config).room
    assert room is not None
    assert 0 <= room.cache_tokens - cache.num_gpu_blocks * cache.block_size < cache.block_size
