"""What a plan counts of what a rollout on a CPU leaves for its update."""

from __future__ import annotations

from pathlib import Path

import pytest

from fovea.config.run import Config
from fovea.tools.plan.plan import make_plan
from tests.tiny_models import save, tiny
from tests.tools.plan.published import wide

PROMPTS, SAMPLES, LIMIT, LENGTH, PROMPT_TOKENS = 6, 4, 12, 10, 20


@pytest.mark.parametrize(("missing", "kept"), [(0, True), (1, False)])
def test_outputs_are_counted_where_they_fit(missing: int, kept: bool, tmp_path: Path) -> None:
    """Reserved for the longest completions, and counted for the expected lengths."""
    parts = tiny("qwen3_vl", **wide("qwen3_vl"))
    text = parts.network.config.text_config
    folder = save(parts, tmp_path)
    heads = (text.num_attention_heads + 2 * text.num_key_value_heads) * text.head_dim
    outputs = 4 * text.num_hidden_layers * (heads + 2 * text.hidden_size + 2 * text.intermediate_size)
    tokens = PROMPTS * (PROMPT_TOKENS + SAMPLES * LIMIT)
    limit = tokens * outputs - missing
    config = Config.model_validate(
        {
            "model": {"path": str(folder), "freeze_vision_tower": True},
            "rollout": {
                "prompts_per_step": PROMPTS,
                "samples_per_prompt": SAMPLES,
                "max_new_tokens": LIMIT,
                "engine": {"reuse_gib": limit / 2**30},
            },
            "plan": {
                "gpu": "cpu",
                "gpus": 1,
                "prompt_tokens": PROMPT_TOKENS,
                "image_tokens": 9,
                "completion_tokens": LENGTH,
            },
        }
    )
    for phase in make_plan(config).phases:
        expected = PROMPTS * (PROMPT_TOKENS + SAMPLES * (LENGTH - 1)) * outputs
        assert phase.parts.get("recorded outputs") == (expected if kept else None)


@pytest.mark.parametrize(
    ("how", "reuse_gib", "kept"),
    [("full", 2.0, True), ("none", 2.0, False), ("none", 300.0, True), ("selective", 300.0, False)],
)
def test_on_a_gpu_the_vision_graph_alone_is_counted(how: str, reuse_gib: float, kept: bool, tmp_path: Path) -> None:
    """Of blocks that are computed again it has the inputs, which fit where the rest would not."""
    folder = save(tiny("qwen3_vl", **wide("qwen3_vl"), vision_depth=24, vision_hidden_size=256), tmp_path)
    config = Config.model_validate(
        {
            "model": {"path": str(folder), "dtype": "bfloat16"},
            "rollout": {
                "prompts_per_step": 64,
                "samples_per_prompt": SAMPLES,
                "max_new_tokens": LIMIT,
                "engine": {"reuse_gib": reuse_gib},
            },
            "train": {"gradient_checkpointing": how},
            "plan": {"gpu": "h100", "gpus": 1, "prompt_tokens": 300, "image_tokens": 256, "completion_tokens": LENGTH},
        }
    )
    phases = make_plan(config).phases
    patches = 64 * 256 * 4
    for phase in phases:
        assert "recorded outputs" not in phase.parts
    rollout, update = (phase.parts.get("vision", 0) for phase in phases[:2])
    inputs = patches * 24 * 256 * 2
    assert (min(rollout, update) > inputs) is kept
