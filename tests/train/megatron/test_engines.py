"""Runs that train by Megatron and draw with an engine of another environment: every weight reaches it by its name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fovea.metrics.log import read_metrics
from tests.rollout.serve_command import serving
from tests.rollout.short_runs import check_exact
from tests.tiny_models import save, tiny
from tests.train.megatron.commands import fovea

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


SHORT = ("max_steps=3", "data.max_prompt_tokens=400", "evaluate.before_training=false")


def check_each_step(run_dir: Path, engine: str) -> None:
    """The parity gate, and log-probs of two later steps: the first weight sync brings all weights."""
    check_exact(run_dir, engine, steps=3)
    assert len({row["weights_checksum"] for row in read_metrics(run_dir)}) == 3


@pytest.mark.parametrize("case", CASES)
def test_the_engine_draws_with_the_weights_of_each_step(case: str, tmp_path: Path) -> None:
    settings = CASES[case]
    fovea(tmp_path, *settings, *SHORT, limit_seconds=PATIENCE)
    check_each_step(tmp_path, settings[0].rpartition("=")[2])


def test_servers_draw_with_the_weights_of_each_step(tmp_path: Path) -> None:
    """The server, and the run's client of it, are in the engine's environment; weights go through a folder."""
    model, weights, run_dir = tmp_path / "model", tmp_path / "weights", tmp_path / "run"
    save(tiny("qwen3_vl", num_layers=2, num_kv_heads=2), model)
    with serving(model, "--for-training", str(weights), python=VLLM) as server:
        server.wait_until_ready()
        engine = (
            "rollout.engine.name=vllm_servers",
            f"rollout.engine.servers=[{server.url}]",
            f"rollout.engine.weights_dir={weights}",
            f"rollout.engine.python={VLLM}",
        )
        its_model = (f"model.path={model}", "model.tiny=null")
        fovea(run_dir, *engine, *SHORT, *its_model, limit_seconds=PATIENCE)
    check_each_step(run_dir, "vllm_servers")
