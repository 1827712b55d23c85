"""What a plan counts of what a rollout on a CPU leaves for its update."""

from __future__ import annotations

from pathlib import Path

import pytest

from fovea.config.run import Config
from fovea.plan.plan import make_plan
from tests.plan.test_plan import wide
from tests.tiny_models import save, tiny

PROMPTS, SAMPLES, LIMIT, LENGTH, PROMPT_TOKENS = 6, 4, 12, 10, 20


@pytest.mark.parametrize(("missing", "kept"), [(0, True), (1, False)])
def test_distributions_are_counted_where_they_fit_beside_outputs(missing: int, kept: bool, tmp_path: Path) -> None:
    """Reserved for the longest completions, and counted for those that are expected."""
    parts = tiny("qwen3_vl", **wide("qwen3_vl"))
    text = parts.network.config.text_config
    folder = save(parts, tmp_path)
    heads = (text.num_attention_heads + 2 * text.num_key_value_heads) * text.head_dim
    outputs = 4 * text.num_hidden_layers * (heads + 2 * text.hidden_size + 2 * text.intermediate_size)
    row = 4 * len(parts.network.get_input_embeddings().weight)
    tokens = PROMPTS * (PROMPT_TOKENS + SAMPLES * LIMIT)
    limit = tokens * outputs + PROMPTS * (1 + SAMPLES * (LIMIT - 1)) * row - missing
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
        assert phase.parts["recorded outputs"] == PROMPTS * (PROMPT_TOKENS + SAMPLES * (LENGTH - 1)) * outputs
        distributions = PROMPTS * (1 + SAMPLES * (LENGTH - 1)) * row
        assert phase.parts.get("recorded distributions") == (distributions if kept else None)
