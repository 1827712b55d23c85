"""Checks shared by the engines of other packages: of models, engine arguments and weight syncs."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import PretrainedConfig

from fovea.errors import EngineError
from fovea.types import Shape
from fovea_gym.errors import ConfigError

QWEN2_VL_MERGE = 2
"""Patches along each side of a visual token, a constant in the Qwen2-VL of vLLM and SGLang."""

DELTA_NETS = ("qwen3_5", "qwen3_5_moe")
"""Families with delta nets. On CPUs, SGLang has kernels for them only with AMX, so they are untested with SGLang."""
_QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
TESTED_FAMILIES = {"vLLM": (*_QWEN, *DELTA_NETS, "glm4v"), "SGLang": _QWEN}
"""By engine, the `model_type`s for which its log-probs and weight syncs have been compared with the trainer's."""


def check_family(family: str, known: Collection[str], *, model: str, setting: str, engine: str) -> None:
    """Raise ConfigError for a model family that is not `known`; `setting` is the engine's name in `rollout.engine`."""
    if family not in known:
        raise ConfigError(
            f"rollout.engine={setting}, but {model} is of family {family}, which Fovea does not support with {engine} "
            f"(supported: {', '.join(known)}); set rollout.engine=embedded"
        )


def check_merge(config: PretrainedConfig, *, model: str, setting: str, engine: str) -> None:
    """Raise ConfigError for a Qwen2-VL whose patches vLLM and SGLang would not merge as its config says."""
    size = config.vision_config.spatial_merge_size
    if config.model_type == "qwen2_vl" and size != QWEN2_VL_MERGE:
        raise ConfigError(
            f"rollout.engine={setting}, but {model} merges {size} x {size} patches into a visual token, and {engine} "
            f"always merges {QWEN2_VL_MERGE} x {QWEN2_VL_MERGE} patches for a Qwen2-VL; set rollout.engine=embedded"
        )


def fitting_length(config: PretrainedConfig, chosen: int | None, default: int, *, model: str) -> int:
    """Maximum length of a prompt with its completion: the `chosen` one, else `default` capped at the model's positions.

    Raises ConfigError if `chosen` exceeds the model's positions.
    """
    positions: int = config.get_text_config().max_position_embeddings
    if chosen is not None and chosen > positions:
        raise ConfigError(
            f"rollout.engine.max_model_len={chosen}, but {model} has positions for {positions} tokens; lower it, or "
            "leave it unset"
        )
    return chosen or min(default, positions)


def check_arguments(
    given: Mapping[str, Any],
    *,
    settings: Mapping[str, str],
    fixed: Mapping[str, Any],
    known: Collection[str],
    engine: str,
    listed: str,
) -> None:
    """Raise ConfigError for an entry of `rollout.engine.engine_args` that is not allowed.

    `settings` maps arguments to the settings that control them, `fixed` maps arguments to the values that Fovea sets,
    `known` holds all arguments of the engine, and `listed` names the class that documents them.
    """
    for key in given:
        here = f"rollout.engine.engine_args.{key}"
        if key in settings:
            raise ConfigError(f"{here}: this argument has its own setting; set rollout.engine.{settings[key]}")
        if key in fixed:
            raise ConfigError(f"{here}: Fovea sets it to {fixed[key]!r}, which training depends on; remove it")
        check_known(key, known, where=here, engine=engine, listed=listed)


def check_known(argument: str, known: Collection[str], *, where: str, engine: str, listed: str) -> None:
    """Raise ConfigError for an argument at `where` that the engine lacks; the class `listed` documents them."""
    if argument not in known:
        near = difflib.get_close_matches(argument, known, n=2, cutoff=0.6)
        meant = f"; did you mean {' or '.join(near)}?" if near else f"; {listed} lists them all"
        raise ConfigError(f"{where}: {engine} has no such engine argument{meant}")


def gpus_of_engine(number: int, cuda: Any = torch.cuda) -> list[int]:
    """Indices of an engine's GPUs: this process's GPU and those after it; ConfigError if there are too few.

    Without them, the engine would use the first GPUs of the machine, which under torchrun belong to other processes.
    """
    own, all_of_them = cuda.current_device(), cuda.device_count()
    if own + number > all_of_them:
        raise ConfigError(
            f"rollout.engine.tensor_parallel_size={number}, but the process on GPU {own} sees {all_of_them} GPUs, and "
            "its engine uses this GPU and those after it; lower it, or place the engine's process on the first of "
            "enough free GPUs (cluster.placement=disaggregated cluster.rollout_gpus=1)"
        )
    return list(range(own, own + number))


@contextmanager
def keeping_gpu(cuda: Any = torch.cuda) -> Iterator[None]:
    """Context manager that restores this thread's current GPU at its end, since an engine may change it."""
    own = cuda.current_device() if cuda.is_available() else None
    try:
        yield
    finally:
        if own is not None:
            cuda.set_device(own)


def check_shapes(sent: Mapping[str, Shape], expected: Mapping[str, Shape], *, engine: str) -> None:
    """Raise EngineError unless the names and shapes of the weights match those of the engine."""
    reshaped = [
        f"{name} has shape {list(shape)} instead of {list(expected[name])}"
        for name, shape in sent.items()
        if name in expected and shape != expected[name]
    ]
    sides = [
        (expected.keys() - sent.keys(), f"that {engine} needs were not sent"),
        (sent.keys() - expected.keys(), f"that were sent {engine} does not have"),
        (reshaped, f"have a different shape in {engine}"),
    ]
    found = [f"{len(names)} {which}, first {min(names)}" for names, which in sides if names]
    if found:
        raise EngineError(
            f"weights do not match between trainer and {engine}: {'; '.join(found)}; both must load the same model: "
            "compare model.path on both sides"
        )


def checkpoint_shapes(model: str, revision: str | None, *, is_tied: bool) -> dict[str, Shape]:
    """Names and shapes of the weights in a model folder as an engine loads them, without the head if `is_tied`."""
    folder = Path(model)
    if not folder.is_dir():
        folder = Path(snapshot_download(model, revision=revision, local_files_only=True))
    shapes: dict[str, Shape] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return {name: shape for name, shape in shapes.items() if not (is_tied and name == "lm_head.weight")}
