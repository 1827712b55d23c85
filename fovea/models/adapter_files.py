"""Loads a LoRA adapter in peft's format into a network's adapters; reads only safetensors, never pickles."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from itertools import dropwhile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from fovea.config.model import Lora
from fovea.errors import ModelError
from fovea.utils.config_numbers import check_numbers
from fovea_gym.errors import ConfigError
from fovea_gym.utils.bounded import read_file

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PARTS = ("lora_A", "lora_B")
WRAPPERS = {"base_model", "model", "language_model"}
"""Wrapper modules in the names of weights; which of them occur depends on the versions of peft and transformers."""
COMPARED = {"r", "lora_alpha", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}
DESCRIPTIVE = {"task_type", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping"}
INITIALISED = "init_lora_weights"
CHANGING_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights` for which peft also changes the weights of the base model."""
OF_TRAINING = {"lora_dropout", INITIALISED}
MERGED = {
    *("alpha_pattern", "bias", "fan_in_fan_out", "layer_replication", "lora_bias", "modules_to_save", "rank_pattern"),
    *("target_parameters", "use_dora", "use_rslora"),
}
"""Keys of LoRA variants that peft merges into the base by arithmetic, without importing other code."""
WITHOUT_EFFECT = COMPARED | DESCRIPTIVE | OF_TRAINING
"""Keys of an adapter's config that are compared elsewhere or do not change the meaning of its tensors."""


def tensor_name(layer: str, part: str) -> str:
    """The name of an adapter's matrix (`lora_A`, `lora_B`) in peft's file, for a layer's path in the network."""
    return f"base_model.model.{layer}.{part}.weight"


@torch.no_grad()
def load_adapter(layers: Mapping[str, LoraLayer], lora: Lora, adapter_name: str) -> None:
    """Copy the tensors of the folder `lora.adapter` into these LoRA layers, given by their paths in the network.

    ConfigError if rank, alpha or layers of the settings differ from the folder's; ModelError if the folder cannot be
    read, or holds a variant of LoRA that Fovea does not train.
    """
    folder = Path(lora.adapter or "")
    _check_config(folder, lora)
    saved, wanted = _tensors(folder, layers), {}
    for layer, module in layers.items():
        for part in PARTS:
            wanted[tensor_name(layer, part)] = getattr(module, part)[adapter_name].weight
    if saved.keys() != wanted.keys():
        first = min(saved.keys() ^ wanted.keys())
        side = "lacks" if first in wanted else "has"
        names = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in saved})
        raise ConfigError(
            f"model.lora.adapter={folder} {side} {first}, unlike model.lora.targets and exclude; the folder has "
            f"adapters for {', '.join(names)}: set model.lora.targets=[{','.join(names)}] and a matching exclude"
        )
    for name, target in wanted.items():
        if saved[name].shape != target.shape:
            raise ModelError(
                f"{folder}: {name} is {list(saved[name].shape)} and the model's layer needs {list(target.shape)}; the "
                "adapter belongs to another model: set model.path to that one"
            )
        target.copy_(saved[name])


def _check_config(folder: Path, lora: Lora) -> None:
    """Raise unless the folder's config agrees with the settings and sets nothing that they do not support."""
    config = _config(folder)
    for key, ours, name in (("r", lora.rank, "rank"), ("lora_alpha", lora.alpha, "alpha")):
        if config.get(key) != ours:
            raise ConfigError(
                f"model.lora.{name}={ours}, but the adapter in {folder} has {config.get(key)}; set "
                f"model.lora.{name}={config.get(key)}"
            )
    other = _first_other_than(WITHOUT_EFFECT, config)
    # peft ignores the case of this value
    if str(config.get(INITIALISED)).lower().startswith(CHANGING_THE_BASE):
        other = INITIALISED
    if other:
        raise ModelError(
            f"{folder}/{ADAPTER_CONFIG}: {other}={config[other]} is a variant of LoRA that Fovea does not train; merge "
            "the adapter into its base with peft (merge_and_unload), and give the result as model.path"
        )


def merge_adapter(network: PreTrainedModel, folder: Path) -> None:
    """Merge an adapter into its base, in place; ModelError if its tensors or layers do not match the base."""
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ModelError(f"{folder} has no {ADAPTER_WEIGHTS}, and other formats can run code; export it again")
    config = _config(folder)
    # peft imports modules that some config keys name
    if key := _first_other_than(WITHOUT_EFFECT | MERGED, config):
        raise ModelError(
            f"{folder}/{ADAPTER_CONFIG}: {key}={config[key]} is a variant of LoRA that Fovea does not merge; merge the "
            "adapter into its base with peft (merge_and_unload), and name the result"
        )
    saved = _tensors(folder, [name for name, module in network.named_modules() if hasattr(module, "weight")])
    try:
        adapted: Any = PeftModel(network, LoraConfig.from_pretrained(str(folder)))
        keys: Any = set_peft_model_state_dict(adapted, saved)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ModelError(
            f"{folder}: the adapter does not fit {network.name_or_path} ({first_line}); give its own base model"
        ) from error
    trained = {name for name, _ in adapted.named_parameters() if ".lora_" in name or ".modules_to_save." in name}
    for side, names in (("has", keys.unexpected_keys), ("lacks", trained.intersection(keys.missing_keys))):
        if names:
            raise ModelError(
                f"{folder}: the adapter {side} {min(names)}, unlike {network.name_or_path} with the layers in its "
                f"{ADAPTER_CONFIG}; give its own base model, or correct its target_modules"
            )
    # in place, so that the network keeps its class and its names
    merged = adapted.merge_and_unload()
    assert merged is network, "peft merged the adapter into another network"


def _first_other_than(known: Collection[str], config: Mapping[str, Any]) -> str | None:
    """The first key outside `known` that is neither off nor at LoRA's default, even if only later versions know it."""
    plain = LoraConfig().to_dict()
    off = {key: (None, False, getattr(value, "value", value)) for key, value in plain.items()}
    others = sorted(config.keys() - set(known))
    return next((key for key in others if config[key] not in off.get(key, (None, False, [], {}, ""))), None)


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_file(folder / ADAPTER_CONFIG))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"model.lora.adapter={folder}: {ADAPTER_CONFIG} cannot be read ({error}); give a folder that peft or "
            "`fovea export --adapter-only` wrote"
        ) from error
    if not isinstance(config, dict):
        raise ModelError(f"{folder}/{ADAPTER_CONFIG} does not hold a mapping; give a folder that peft wrote")
    pattern = config.get("rank_pattern") or {}
    ranks = [config.get("r"), *(pattern.values() if isinstance(pattern, dict) else [pattern])]
    check_numbers(str(folder), ADAPTER_CONFIG, config | {"r": ranks})
    return config


def _tensors(folder: Path, layers: Iterable[str]) -> dict[str, Tensor]:
    """The folder's tensors, under the names that the installed peft uses for these layers of a network.

    Versions of transformers nest the same layers in different modules, and a state dict from training also contains
    the adapter's name.
    """
    ours = {_unwrapped(layer): layer for layer in layers}
    named: dict[str, Tensor] = {}
    for key, tensor in _load(folder).items():
        path, _, part = key.partition(".lora_")
        layer, name = ours.get(_unwrapped(path)), key
        if layer is not None:
            name = f"base_model.model.{layer}.lora_" + re.sub(r"^([AB])\.\w+\.weight$", r"\1.weight", part)
        if name in named:
            raise ModelError(
                f"{folder}: {ADAPTER_WEIGHTS} holds {name} under two names; save one adapter with peft's "
                "save_pretrained"
            )
        named[name] = tensor
    return named


def _unwrapped(path: str) -> str:
    return ".".join(dropwhile(WRAPPERS.__contains__, path.split(".")))


def _load(folder: Path) -> dict[str, Tensor]:
    try:
        return load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"model.lora.adapter={folder}: {ADAPTER_WEIGHTS} cannot be read ({error}); save the adapter with peft's "
            "save_pretrained(safe_serialization=True): other formats are not read, since they can run code"
        ) from error
