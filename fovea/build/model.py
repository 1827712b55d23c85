"""The model on its device, with what is trained chosen."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Literal

import torch

from fovea.config.run import Config, Model
from fovea.environments.base import Environment
from fovea.errors import ConfigError, DataError
from fovea.models.kernels import TORCH_KERNELS, Kernels
from fovea.models.load import DTYPES, load_pretrained, pick_device
from fovea.models.loaded import ModelParts, config_of
from fovea.models.tiny import make_tiny
from fovea.models.trainable import choose_trainable, recompute_activations
from fovea.models.value_head import ValueHead
from fovea.models.vision.disk_cache import SpillFolder
from fovea.models.vision.feature_cache import FeatureCache
from fovea.models.vlm import VLM

CORPUS_ROWS = 2000
"""Enough rows to know the words of a task by."""


def make_model(config: Config, environment: Environment) -> tuple[ModelParts, VLM]:
    """The model on its device, with what is trained chosen."""
    parts = make_parts(config, environment)
    return parts, make_vlm(config, parts)


def make_parts(config: Config, environment: Environment) -> ModelParts:
    """The model as it is made or loaded."""
    settings = config.model
    if settings.tiny is None:
        return load_pretrained(settings)
    parts = make_tiny(settings.tiny, _corpus(environment, config.data.on_bad_row), config.seed)
    for parameter in parts.network.parameters():  # not the frequencies of rotary positions: those stay float32
        parameter.data = parameter.data.to(DTYPES[settings.dtype])
    return parts


def make_vlm(config: Config, parts: ModelParts) -> VLM:
    """The model on its device, with what is trained chosen."""
    settings = config.model
    device = pick_device(settings.device)
    kernels = _liger_kernels(device) if config.train.backend.liger_kernels else TORCH_KERNELS
    choose_trainable(parts.network, settings, config.seed)
    if config.train.gradient_checkpointing:
        recompute_activations(parts.network)
    _check_attention(settings, device)
    cache = None if settings.trains_vision else make_feature_cache(config)
    vlm = VLM(
        parts,
        attention=settings.attention,
        feature_cache=cache,
        kernels=kernels,
        value_head=make_value_head(config, parts),
    )
    return vlm.to(device)


def make_value_head(config: Config, parts: ModelParts) -> ValueHead | None:
    """On the policy's trunk, where PPO's value function shares that."""
    critic = config.algorithm.critic
    if critic is None or critic.trunk == "separate":
        return None
    return ValueHead(config_of(parts.network).text_config.hidden_size, detach_trunk=critic.trunk == "detached")


def _check_attention(settings: Model, device: torch.device) -> None:
    """Two kernels run on one kind of device each."""
    if settings.attention == "merged" and device.type != "cpu":
        raise ConfigError(f"model.attention=merged is for CPUs, but the model is on {device.type}; set it to auto")
    if settings.attention == "varlen" and device.type == "cuda" and settings.dtype != "bfloat16":
        raise ConfigError(
            f"model.attention=varlen takes 16-bit numbers on CUDA, but model.dtype={settings.dtype}; set "
            "model.dtype=bfloat16, or model.attention=auto"
        )


def _liger_kernels(device: torch.device) -> Kernels:
    """Its kernels run on CUDA, from an extra."""
    if device.type != "cuda":
        raise ConfigError(
            f"train.backend.liger_kernels=true, but the model is on {device.type} and Liger's kernels run on CUDA "
            "only; set train.backend.liger_kernels=false, or model.device=cuda where there is one"
        )
    # an extra: absent packages are named by its own error
    kernels: Kernels = importlib.import_module("fovea.models.kernels_liger").LIGER_KERNELS
    return kernels


def make_feature_cache(config: Config) -> FeatureCache:
    """Features of a frozen vision tower in memory and, where asked for, in files beside the run's own."""
    settings = config.model
    files = None
    if settings.feature_spill_gib:
        files = SpillFolder(Path(config.run_dir) / "features", settings.feature_spill_gib * 2**30)
    return FeatureCache(settings.feature_cache_gib * 2**30, files)


def _corpus(environment: Environment, on_bad_row: Literal["error", "skip"]) -> list[str]:
    """Questions and answers of the first training rows: the words of the task."""
    tasks = environment.tasks("train")
    texts: list[str] = []
    for index in range(min(len(tasks), CORPUS_ROWS)):
        try:
            task = tasks[index]
        except DataError:
            if on_bad_row == "error":
                raise
            continue  # counted when the run comes to it
        texts += [task.question, environment.target(task)]
    return texts
