"""`rollout.engine.engine_args` against vLLM's own list of arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from fovea.config.backends import VllmSettings
from fovea.config.model import Model
from fovea.models.tiny import save_tiny
from fovea.rollout.checks import gpus_of_engine
from fovea.rollout.vllm.arguments import check_model, engine_arguments, make_engine
from fovea_gym.errors import ConfigError
from tests.rollout.fake_cuda import FakeCuda
from tests.tiny_models import tiny


def arguments(**given: Any) -> dict[str, Any]:
    return engine_arguments(VllmSettings(engine_args=given), Model(path="x"), max_model_len=100, seed=3)


def test_further_arguments_reach_vllm_beside_the_settings() -> None:
    made = arguments(block_size=32)
    assert (made["block_size"], made["max_model_len"], made["seed"]) == (32, 100, 3)


def test_more_tokens_than_the_model_has_positions_for_are_refused(tmp_path: Path) -> None:
    parts = tiny("qwen3_vl")
    save_tiny(parts, tmp_path)
    with pytest.raises(ConfigError, match=r"max_model_len=5000, but \S+ has .* 4096 "):
        make_engine(
            VllmSettings(max_model_len=5000), Model(path=str(tmp_path)), parts.processor, max_model_len=1, seed=0
        )


def test_the_reason_of_a_refusal_is_told(tmp_path: Path) -> None:
    """By vLLM's settings, which pydantic checks."""
    parts = tiny("qwen3_vl")
    save_tiny(parts, tmp_path)
    settings = VllmSettings(engine_args={"kv_cache_dtype": "float1"})
    with pytest.raises(ConfigError, match=r"does not start: ValidationError: cache_dtype: Input should be 'auto'"):
        make_engine(settings, Model(path=str(tmp_path)), parts.processor, max_model_len=9000, seed=0)


@pytest.mark.parametrize(("own", "workers", "gpus"), [(0, 1, [0]), (3, 1, [3]), (2, 2, [2, 3])])
def test_each_process_gives_vllm_its_own_gpu(own: int, workers: int, gpus: list[int], tmp_path: Path) -> None:
    """As vLLM itself resolves its arguments; by default the workers of every process begin at GPU 0."""
    save_tiny(tiny("qwen3_vl"), tmp_path)
    settings = VllmSettings(tensor_parallel_size=workers)
    found = gpus_of_engine(workers, FakeCuda(own))
    made = engine_arguments(settings, Model(path=str(tmp_path)), max_model_len=100, seed=3, gpus=found)
    parallel = EngineArgs(**made).create_engine_config().parallel_config
    assert (parallel.assigned_physical_gpu_ids, parallel.world_size) == (gpus, workers)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"blok_size": 32}, r"engine_args\.blok_size: vLLM has no such engine argument; did you mean block_size"),
        ({"zzz": 1}, r"engine_args\.zzz: vLLM has no such engine argument; vLLM's EngineArgs lists them all"),
        (
            {"max_num_seqs": 8},
            r"engine_args\.max_num_seqs: this argument has its own setting; set rollout\.engine\.max_num_seqs",
        ),
        ({"logprobs_mode": "raw_logprobs"}, r"logprobs_mode: Fovea sets it to 'processed_logprobs'.*remove it"),
        ({"device_ids": [1]}, r"device_ids: Fovea sets it"),
        ({"trust_remote_code": True}, r"trust_remote_code: Fovea sets it to False"),
    ],
)
def test_arguments_that_vllm_lacks_or_fovea_sets_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arguments(**given)


def test_another_number_of_merged_patches_than_vllm_merges_is_refused(tmp_path: Path) -> None:
    """As SmolVL's 4 x 4: vLLM would end by a bare AssertionError where it loads the merger."""
    parts = tiny("qwen2_vl")
    save_tiny(parts, tmp_path)
    model = Model(path=str(tmp_path))
    check_model(parts.processor, model, "vllm")
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["spatial_merge_size"] = 4
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"vllm, but \S+ merges 4 x 4 patches into a visual token, and vLLM .* 2 x 2"):
        check_model(parts.processor, model, "vllm")
