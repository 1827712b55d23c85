"""`rollout.engine.engine_args` against SGLang's own list of arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.server_args import ServerArgs

from fovea.config.backends import SglangSettings
from fovea.config.model import Model
from fovea.models.tiny import save_tiny
from fovea.rollout.sglang.arguments import CPU_ARGUMENTS, SETTINGS, make_engine, server_arguments
from fovea_gym.errors import ConfigError
from tests.rollout.engines.serving import start
from tests.tiny_models import tiny


def arguments(device: str = "cpu", engine_args: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    made = SglangSettings(engine_args=engine_args or {}, **settings)
    return server_arguments(made, Model(path="x"), max_model_len=100, seed=3, device=torch.device(device))


def test_further_arguments_reach_sglang_beside_the_settings() -> None:
    made = arguments(engine_args={"schedule_policy": "fcfs", "log_level": "info"}, max_num_seqs=17)
    assert (made["schedule_policy"], made["log_level"], made["max_running_requests"]) == ("fcfs", "info", 17)
    assert (made["context_length"], made["random_seed"], made["device"]) == (108, 3, "cpu")


def test_every_argument_is_one_that_sglang_has() -> None:
    all_settings = {"max_total_tokens": 9000, "max_num_batched_tokens": 512}
    for device in ("cpu", "cuda:1"):
        made = arguments(device, **all_settings)
        assert made.keys() <= set(ServerArgs.__struct_fields__)
        assert made.keys() >= SETTINGS.keys()
    assert (made["base_gpu_id"], made["enable_memory_saver"], made["chunked_prefill_size"]) == (1, True, 512)
    assert not made.keys() & CPU_ARGUMENTS.keys()
    assert arguments("cuda:0", enable_chunked_prefill=False)["chunked_prefill_size"] == -1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"page_sise": 32}, r"engine_args\.page_sise: SGLang has no such engine argument; did you mean page_size"),
        ({"zzz": 1}, r"engine_args\.zzz: SGLang has no such engine argument; SGLang's ServerArgs lists them all"),
        (
            {"tp_size": 2},
            r"engine_args\.tp_size: this argument has its own setting; set rollout\.engine\.tensor_parallel_size",
        ),
        ({"sampling_backend": "flashinfer"}, r"sampling_backend: Fovea sets it to 'pytorch'.*remove it"),
        ({"trust_remote_code": True}, r"trust_remote_code: Fovea sets it to False"),
    ],
)
def test_arguments_that_sglang_lacks_or_fovea_sets_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arguments(engine_args=given)


def test_patches_that_sglang_would_take_for_features_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"SGLang mistakes patches of a Qwen2\.5-VL for features .* has patches of 8 x 8"
    ):
        start(tiny("qwen2_5_vl"), tmp_path / "model")


def test_another_number_of_vision_features_than_sglang_adds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"features of 3 vision layers .* has deepstack_visual_indexes=\[0\]; use"):
        start(tiny("qwen3_vl_moe"), tmp_path / "model")


def test_another_number_of_merged_patches_than_sglang_merges_is_refused(tmp_path: Path) -> None:
    parts = tiny("qwen2_vl")
    save_tiny(parts, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["spatial_merge_size"] = 4
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"merges 4 x 4 patches into a visual token, and SGLang .* 2 x 2"):
        make_engine(SglangSettings(), Model(path=str(tmp_path)), parts.processor, max_model_len=100, seed=0)


def test_more_tokens_than_the_model_has_positions_for_are_refused(tmp_path: Path) -> None:
    parts = tiny("qwen3_vl")
    save_tiny(parts, tmp_path)
    with pytest.raises(ConfigError, match=r"max_model_len=5000, but \S+ has .* 4096 "):
        make_engine(
            SglangSettings(max_model_len=5000), Model(path=str(tmp_path)), parts.processor, max_model_len=1, seed=0
        )
