"""Construction of the engine for `rollout.engine=sglang`, from its settings and SGLang's server arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.server_args import ServerArgs
from transformers import AutoConfig, PretrainedConfig

from fovea.config.backends import CPU_KV_CACHE_TOKENS, SglangSettings
from fovea.config.model import Model
from fovea.errors import EngineError, LostEngineError
from fovea.models.load import pick_device
from fovea.models.model_files import hub_options
from fovea.models.processor import Processor
from fovea.processes.engine_process import EngineProcess, Limits
from fovea.rollout.checks import (
    TESTED_FAMILIES,
    check_arguments,
    check_family,
    check_merge,
    fitting_length,
    gpus_of_engine,
)
from fovea.rollout.outputs import CompletionText
from fovea.rollout.sglang.engine import SglangEngine
from fovea.rollout.sglang.inputs import SglangTranslator
from fovea.rollout.sglang.weights import SglangWeights
from fovea_gym.errors import ConfigError
from fovea_gym.utils.launch import module_command

FAMILIES = TESTED_FAMILIES["SGLang"]
"""Families whose processed tensors and fused weights `rollout.sglang.inputs` and `rollout.sglang.scheduler` support."""

PATCH_VALUES = 1176
"""Values per patch (3 x 2 x 14 x 14) by which SGLang distinguishes pixels from features, for Qwen2.5-VL only."""
DEEPSTACK_LAYERS = 3
"""Number of vision layers whose features SGLang's Qwen3-VL-MoE adds to its decoder, regardless of the config."""

CONTEXT_MARGIN_TOKENS = 8
"""Tokens added to SGLang's context length, since SGLang reserves a few of them."""

SETTINGS: Mapping[str, str] = {
    "tp_size": "tensor_parallel_size",
    "mem_fraction_static": "gpu_memory_utilization",
    "max_total_tokens": "max_total_tokens",
    "context_length": "max_model_len",
    "max_running_requests": "max_num_seqs",
    "max_prefill_tokens": "max_num_batched_tokens",
    "chunked_prefill_size": "enable_chunked_prefill",
    "disable_cuda_graph": "enforce_eager",
}
"""Maps SGLang's arguments to the settings that control them."""
CPU_ARGUMENTS: Mapping[str, Any] = {
    # SGLang's own CPU kernels need AMX
    "attention_backend": "torch_native",
    "mm_attention_backend": "sdpa",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    # otherwise an idle scheduler keeps a core busy that the trainer needs
    "sleep_on_idle": True,
}

ENVIRONMENT: Mapping[str, str] = {
    # cached image features would outlive the weights that computed them
    "SGLANG_VLM_CACHE_SIZE_MB": "0",
    # otherwise SGLang returns log-probs without temperature and banned ids, not those that it samples from
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
    # allows CONTEXT_MARGIN_TOKENS; Fovea itself compares max_model_len with the model
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
}
"""Environment variables of the engine's processes, which override the trainer's."""
HOST = tuple(module_command("fovea.rollout.sglang.host"))
CPU_ENVIRONMENT: Mapping[str, str] = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # otherwise SGLang compiles its sampler, which needs a C++ compiler on a CPU
    "TORCHDYNAMO_DISABLE": "1",
}


def make_engine(
    settings: SglangSettings, model: Model, processor: Processor, *, max_model_len: int, seed: int
) -> SglangEngine:
    """Start SGLang with the model's folder, in separate processes; ConfigError if it refuses the model or an argument.

    `max_model_len` is the default of the setting with this name.
    """
    check_family(processor.family.model_type, FAMILIES, model=model.name, setting=settings.name, engine="SGLang")
    assert model.path is not None, "an engine serves a model from its folder"
    config = AutoConfig.from_pretrained(model.path, **hub_options(model))
    max_model_len = fitting_length(config, settings.max_model_len, max_model_len, model=model.name)
    check_vision(config, model.name)
    check_merge(config, model=model.name, setting=settings.name, engine="SGLang")
    device = pick_device(model.device)
    if device.type != "cpu":
        device = torch.device(device.type, gpus_of_engine(settings.tensor_parallel_size)[0])
    arguments = server_arguments(settings, model, max_model_len=max_model_len, seed=seed, device=device)
    on_cpu = device.type == "cpu"
    try:
        process = EngineProcess(
            "SGLang",
            HOST,
            arguments,
            Limits(start_seconds=settings.start_seconds, timeout_seconds=settings.timeout_seconds),
            {**ENVIRONMENT, **(CPU_ENVIRONMENT if on_cpu else {})},
        )
    except (EngineError, LostEngineError) as error:
        raise ConfigError(f"rollout.engine=sglang does not start: {error}") from error
    weights = SglangWeights(
        process,
        model.path,
        model.revision,
        dtype=getattr(torch, model.dtype),
        is_tied=bool(config.tie_word_embeddings or config.get_text_config().tie_word_embeddings),
        workers=settings.tensor_parallel_size,
    )
    translator = SglangTranslator(
        stop_ids=processor.stop_ids,
        banned_ids=processor.banned_ids,
        min_new_tokens=settings.min_new_tokens,
    )
    return SglangEngine(
        process,
        weights,
        translator,
        CompletionText(processor.tokenizer, processor.stop_ids),
        max_model_len=max_model_len,
        max_images=settings.limit_mm_per_prompt.image,
    )


def server_arguments(
    settings: SglangSettings, model: Model, *, max_model_len: int, seed: int, device: torch.device
) -> dict[str, Any]:
    """Build SGLang's server arguments; ConfigError for an `engine_args` that is unknown or has its own setting."""
    chosen = _chosen(settings, max_model_len, on_cpu=device.type == "cpu")
    fixed = _fixed(model, seed, device)
    check_arguments(
        settings.engine_args,
        settings=SETTINGS,
        fixed=fixed,
        known=ServerArgs.__struct_fields__,
        engine="SGLang",
        listed="SGLang's ServerArgs",
    )
    of_device = CPU_ARGUMENTS if device.type == "cpu" else {}
    return {"log_level": "warning", **of_device, **fixed, **chosen, **settings.engine_args}


def _chosen(settings: SglangSettings, max_model_len: int, *, on_cpu: bool) -> dict[str, Any]:
    """Arguments that settings control, as in `SETTINGS`; an argument that is None is left to SGLang."""
    total_tokens = settings.max_total_tokens or (max(CPU_KV_CACHE_TOKENS, 2 * max_model_len) if on_cpu else None)
    arguments = {
        "tp_size": settings.tensor_parallel_size,
        "mem_fraction_static": settings.gpu_memory_utilization,
        "max_total_tokens": total_tokens,
        "context_length": max_model_len + CONTEXT_MARGIN_TOKENS,
        "max_running_requests": settings.max_num_seqs,
        "max_prefill_tokens": settings.max_num_batched_tokens,
        "chunked_prefill_size": settings.max_num_batched_tokens if settings.enable_chunked_prefill else -1,
        "disable_cuda_graph": settings.enforce_eager or on_cpu,
    }
    return {key: value for key, value in arguments.items() if value is not None}


def _fixed(model: Model, seed: int, device: torch.device) -> dict[str, Any]:
    return {
        "model_path": model.path,
        "revision": model.revision,
        "dtype": model.dtype,
        "random_seed": seed % 2**31,
        "trust_remote_code": False,
        "device": device.type,
        "base_gpu_id": device.index or 0,
        # lets the engine free memory for the update
        "enable_memory_saver": device.type != "cpu",
        # the backend that samples by a request's seed
        "sampling_backend": "pytorch",
        # every request carries its own stop tokens and sampling parameters
        "sampling_defaults": "openai",
        "skip_server_warmup": True,
        "disable_radix_cache": False,
    }


def check_vision(config: PretrainedConfig, model: str) -> None:
    """Raise ConfigError for a vision tower that SGLang would not run as its config says."""
    vision = config.vision_config
    if config.model_type == "qwen2_5_vl" and 3 * vision.temporal_patch_size * vision.patch_size**2 != PATCH_VALUES:
        raise ConfigError(
            f"SGLang mistakes patches of a Qwen2.5-VL for features unless they are 14 x 14 pixels, and {model} has "
            f"patches of {vision.patch_size} x {vision.patch_size}; use another engine, such as rollout.engine=embedded"
        )
    if config.model_type == "qwen3_vl_moe" and len(vision.deepstack_visual_indexes) != DEEPSTACK_LAYERS:
        raise ConfigError(
            f"SGLang adds features of {DEEPSTACK_LAYERS} vision layers to the decoder of a Qwen3-VL-MoE, but {model} "
            f"has deepstack_visual_indexes={vision.deepstack_visual_indexes}; use another engine, such as "
            "rollout.engine=embedded"
        )
