"""Construction of the engine for `rollout.engine=vllm`, from its settings and vLLM's engine arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from transformers import AutoConfig, PretrainedConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor

from fovea.config.backends import CPU_KV_CACHE_GIB, VllmSettings
from fovea.config.model import Model
from fovea.models.model_files import hub_options
from fovea.models.processor import Processor
from fovea.rollout.checks import (
    DELTA_NETS,
    TESTED_FAMILIES,
    check_arguments,
    check_family,
    check_merge,
    fitting_length,
    gpus_of_engine,
    keeping_gpu,
)
from fovea.rollout.outputs import CompletionText
from fovea.rollout.vllm.engine import VllmEngine
from fovea.rollout.vllm.inputs import VllmTranslator
from fovea.rollout.vllm.server import TRAINED_ON
from fovea.rollout.vllm.worker import VllmAdapter, room_for
from fovea_gym.errors import ConfigError, first_line, named

RECEIVER = "fovea.rollout.vllm.worker.WeightReceiver"

FAMILIES = TESTED_FAMILIES["vLLM"]
"""Families whose processed tensors vLLM accepts under the names in `rollout.outputs.stacked`."""


def make_engine(
    settings: VllmSettings, model: Model, processor: Processor, *, max_model_len: int, seed: int
) -> VllmEngine:
    """Start vLLM in this process with the model's folder; ConfigError if vLLM refuses the model or an argument.

    `max_model_len` is the default of the setting with this name.
    """
    config = check_model(processor, model, settings.name)
    max_model_len = fitting_length(config, settings.max_model_len, max_model_len, model=model.name)
    gpus = None if current_platform.is_cpu() else gpus_of_engine(settings.tensor_parallel_size)
    arguments = engine_arguments(settings, model, max_model_len=max_model_len, seed=seed, gpus=gpus)
    if processor.family.model_type in DELTA_NETS:
        check_delta_nets(model, on_cpu=gpus is None, takes_adapters=settings.enable_lora)
        # prefix caching makes vLLM split prompts, which fails in its CPU build
        arguments["enable_prefix_caching"] = gpus is not None
    refusal = named(lambda error: ConfigError(f"rollout.engine=vllm: vLLM does not start: {first_line(error)}"))
    with refusal, keeping_gpu():
        vllm_config = EngineArgs(**arguments).create_engine_config()
        # not `from_engine_args`, which reads an environment variable to decide about worker processes
        with in_a_world_of_its_own():
            llm = LLMEngine(vllm_config, Executor.get_class(vllm_config), log_stats=False, multiprocess_mode=False)
    fields = llm.renderer.get_mm_processor()._get_mm_fields_config
    translator = VllmTranslator(
        fields=lambda tensors: fields(tensors, {}),
        image_token_id=processor.family.image_token_id,
        stop_ids=processor.stop_ids,
        banned_ids=processor.banned_ids,
        min_new_tokens=settings.min_new_tokens,
    )
    text = CompletionText(processor.tokenizer, processor.stop_ids)
    adapter = None if model.lora is None or not settings.enable_lora else VllmAdapter(llm, model.lora)
    return VllmEngine(llm, translator, text, max_images=settings.limit_mm_per_prompt.image, adapter=adapter)


def check_model(processor: Processor, model: Model, setting: str) -> PretrainedConfig:
    """Return the model's config; ConfigError if Fovea cannot pass its images to vLLM. `setting` names the engine."""
    check_family(processor.family.model_type, FAMILIES, model=model.name, setting=setting, engine="vLLM")
    assert model.path is not None, "an engine serves a model from its folder"
    config: PretrainedConfig = AutoConfig.from_pretrained(model.path, **hub_options(model))
    check_merge(config, model=model.name, setting=setting, engine="vLLM")
    return config


def check_delta_nets(model: Model, *, on_cpu: bool, takes_adapters: bool) -> None:
    """Raise ConfigError for settings with which vLLM (0.32) cannot run a model with delta nets."""
    if on_cpu and model.dtype != "bfloat16":
        raise ConfigError(
            f"rollout.engine=vllm and model.dtype={model.dtype}, but {model.name} has delta nets, which vLLM computes "
            "on a CPU in bfloat16 only; set model.dtype=bfloat16, or rollout.engine=embedded"
        )
    if takes_adapters:
        raise ConfigError(
            f"rollout.engine.enable_lora=true, but {model.name} has delta nets, whose adapters Fovea does not sync to "
            "vLLM; set rollout.engine.enable_lora=false, which sends merged weights"
        )


@contextmanager
def in_a_world_of_its_own() -> Iterator[None]:
    """Hide the run's process group from vLLM, which would otherwise use it as its own world.

    vLLM would then create its groups in collective calls that all ranks of the run must join, also those without vLLM.
    """
    of_the_run = dist.GroupMember.WORLD
    dist.GroupMember.WORLD = None
    try:
        yield
    finally:
        dist.GroupMember.WORLD = of_the_run


def engine_arguments(
    settings: VllmSettings, model: Model, *, max_model_len: int, seed: int, gpus: list[int] | None = None
) -> dict[str, Any]:
    """Build vLLM's engine arguments; ConfigError for an `engine_args` that is unknown or has its own setting.

    `gpus` holds indices among the GPUs that this process sees; None on a CPU.
    """
    on_cpu = bool(current_platform.is_cpu())
    kv_cache_gib = settings.kv_cache_gib or (CPU_KV_CACHE_GIB if on_cpu else None)
    chosen: dict[str, Any] = {
        "tensor_parallel_size": settings.tensor_parallel_size,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "kv_cache_memory_bytes": None if kv_cache_gib is None else int(kv_cache_gib * 2**30),
        "max_model_len": max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        # vLLM's CPU build (0.32) fails on a seeded request whose prompt is prefilled in chunks
        "enable_chunked_prefill": settings.enable_chunked_prefill and not on_cpu,
        "enforce_eager": settings.enforce_eager,
        "limit_mm_per_prompt": {"image": settings.limit_mm_per_prompt.image, "video": 0},
    }
    fixed: dict[str, Any] = {
        "model": model.path,
        "revision": model.revision,
        "dtype": model.dtype,
        "seed": seed,
        "use_tqdm_on_load": False,
        **TRAINED_ON,
        "enable_sleep_mode": not on_cpu,
        "worker_extension_cls": RECEIVER,
        # otherwise every process of torchrun would use the first GPU
        "device_ids": gpus,
        # a single worker runs in this process and receives weights by reference; several are processes that get copies
        "distributed_executor_backend": "uni" if settings.tensor_parallel_size == 1 else "mp",
    }
    if settings.enable_lora and model.lora is not None:
        chosen |= {"enable_lora": True, "max_lora_rank": room_for(model.lora.rank), "max_loras": 1}
    check_arguments(
        settings.engine_args,
        settings={key: key for key in chosen},
        fixed=fixed,
        known={field.name for field in dataclasses.fields(EngineArgs)},
        engine="vLLM",
        listed="vLLM's EngineArgs",
    )
    return fixed | chosen | dict(settings.engine_args)
