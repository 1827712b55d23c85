"""Runs that train by Megatron and draw with an engine of another environment: every weight reaches it by its name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fovea.metrics.log import read_metrics
from tests.rollout.short_runs import check_exact
from tests.train.megatron.test_run import fovea

VLLM = os.environ.get("FOVEA_VLLM_PYTHON", ".venv-vllm/bin/python")
SGLANG = os.environ.get("FOVEA_SGLANG_PYTHON", ".venv-sglang/bin/python")
"""Interpreters of the environments of the engines, which want transformers 5."""
ON_VLLM = (
    "rollout.engine.name=vllm",
    f"rollout.engine.python={VLLM}",
    "rollout.engine.enforce_eager=true",
    "rollout.engine.kv_cache_gib=0.25",
)
ADAPTERS = ("model.lora.rank=4", "model.lora.exclude=[layers.1.mlp]", "rollout.engine.enable_lora=true")
PATIENCE = 400.0
"""Both libraries are imported, one after the other."""
CASES = {
    "adapters beside the weights, vLLM": (*ON_VLLM, *ADAPTERS),
    "all weights, SGLang": ("rollout.engine.name=sglang", f"rollout.engine.python={SGLANG}"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_engine_draws_with_the_weights_of_each_step(case: str, tmp_path: Path) -> None:
    """The parity gate, and log-probs of two later steps: the first push brings all weights, others what is trained."""
    settings = CASES[case]
    short = ("max_steps=3", "data.max_prompt_tokens=400", "evaluate.before_training=false")
    fovea(tmp_path, *settings, *short, limit_seconds=PATIENCE)
    check_exact(tmp_path, settings[0].rpartition("=")[2], steps=3)
    assert len({row["weights_checksum"] for row in read_metrics(tmp_path)}) == 3
