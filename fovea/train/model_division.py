"""Checks that a model and its training processes can be divided as the Megatron settings require."""

from __future__ import annotations

from typing import Any

from fovea.config.backends import MegatronBackend
from fovea_gym.errors import ConfigError

MIXTURE = "qwen3_vl_moe"
"""The supported `model_type` with experts."""
FAMILIES = ("qwen2_5_vl", "qwen3_vl", MIXTURE)
"""The `model_type`s for which Megatron's bridge and Fovea's passes have been compared with transformers."""


def check_processes(settings: MegatronBackend, size: int) -> None:
    """ConfigError if the settings cannot divide `size` training processes evenly."""
    tensor, pipeline = settings.tensor_parallel_size, settings.pipeline_parallel_size
    if size % (tensor * pipeline):
        raise ConfigError(
            f"train.backend: tensor_parallel_size={tensor} times pipeline_parallel_size={pipeline} does not divide the "
            f"number of training processes, {size}; start a multiple of {tensor * pipeline}, or lower one of the two"
        )
    experts = settings.expert_parallel_size
    if size % (experts * pipeline):
        raise ConfigError(
            f"train.backend.expert_parallel_size={experts} does not divide the number of training processes of a "
            f"pipeline stage, {size // pipeline}; start a multiple of {experts * pipeline}, or lower it"
        )


def check_division(family: str, text: Any, settings: MegatronBackend) -> None:
    """ConfigError if the settings cannot divide the language model evenly; `text` is its config."""
    tensor, pipeline = settings.tensor_parallel_size, settings.pipeline_parallel_size
    check_experts(family, settings)
    divided = {
        "experts": (getattr(text, "num_experts", 0), "expert_parallel_size", settings.expert_parallel_size),
        "attention heads": (text.num_attention_heads, "tensor_parallel_size", tensor),
        "key-value heads": (text.num_key_value_heads, "tensor_parallel_size", tensor),
        "vocabulary entries": (text.vocab_size, "tensor_parallel_size", tensor),
        "layers": (text.num_hidden_layers, "pipeline_parallel_size", pipeline),
    }
    for what, (number, setting, parts) in divided.items():
        if number % parts:
            raise ConfigError(
                f"train.backend.{setting}={parts} does not divide the model's {number} {what}; set it to a divisor"
            )


def check_experts(family: str, settings: MegatronBackend) -> None:
    """ConfigError if there are no experts to divide, or if each GPU of a tensor group would hold all of them."""
    tensor, experts = settings.tensor_parallel_size, settings.expert_parallel_size
    if family != MIXTURE:
        if experts > 1:
            raise ConfigError(
                f"train.backend.expert_parallel_size={experts}, but a {family} has no experts; set it to 1"
            )
        return
    if tensor > 1 and (experts % tensor or not settings.sequence_parallel):
        raise ConfigError(
            f"train.backend.tensor_parallel_size={tensor}, but a {family} needs its tokens and experts divided among "
            f"the same GPUs; set train.backend.sequence_parallel=true and "
            f"train.backend.expert_parallel_size to a multiple of {tensor}, or tensor_parallel_size to 1"
        )
