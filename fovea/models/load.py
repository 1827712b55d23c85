"""Loads the network of a model folder or hub id."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from fovea.config.model import Model
from fovea.errors import ModelError
from fovea.models.model_files import WHOLE_MODEL, check_folder, damaged_model, hub_options, no_progress_bar
from fovea.models.modules import config_of
from fovea.models.policy_network import PolicyNetwork
from fovea.models.trainable import merged_weights
from fovea.models.transformers_versions import EXPERTS, OLD, is_turned, load_config
from fovea.types import Weights
from fovea.utils.config_keys import check_config_keys, check_unquantized

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def pick_device(wanted: str) -> torch.device:
    """The device that `model.device` names; auto is cuda if available, else cpu."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ModelError("model.device=cuda, but torch sees no CUDA device; set model.device=auto or cpu")
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(wanted)


def empty_network(settings: Model) -> PreTrainedModel:
    """The network of `model.path` on the meta device, in evaluation mode; reads only the config file."""
    assert settings.path is not None, "a tiny model is loaded from the folder that it was written to"
    with damaged_model(settings.path), torch.device("meta"):
        check_config_keys(settings.path, settings.revision or "main")
        config = load_config(settings.path, **hub_options(settings))
        network: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=DTYPES[settings.dtype])
    network.eval()
    return network


def load_network(settings: Model) -> PreTrainedModel:
    """The network of `model.path` on the CPU, in evaluation mode; ModelError when weights are missing or damaged."""
    path = settings.path
    assert path is not None, "a tiny model is loaded from the folder that it was written to"
    check_folder(path, settings.revision)
    options = hub_options(settings)
    with damaged_model(path), no_progress_bar():
        check_config_keys(path, options["revision"])
        check_unquantized(path, options["revision"])
        loaded: Any = AutoModelForImageTextToText.from_pretrained(
            path,
            config=load_config(path, **options),
            dtype=DTYPES[settings.dtype],
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    network: PreTrainedModel = loaded[0]
    info = loaded[1]
    # transformers only warns about missing weights and initialises them at random
    wrong = sorted({*info["missing_keys"], *(str(key) for key in info.get("mismatched_keys", ()))})
    if wrong:
        raise ModelError(
            f"model.path={path}: {len(wrong)} tensors are missing from its weights or have another size, first "
            f"{wrong[0]}; {WHOLE_MODEL}"
        )
    network.eval()
    return network


def in_hub_layout(experts: Tensor) -> Tensor:
    """A view [experts, inputs, outputs] of a weight [experts, outputs, inputs]."""
    return experts.transpose(1, 2)


def plain_network(network: PreTrainedModel, weights: Weights | None = None) -> PreTrainedModel:
    """An unmodified transformers model with these weights.

    By default these are the network's weights with adapters merged; weights without an adapter are shared, not copied.
    """
    # rebuilding the config from its dict drops the name of our attention implementation, unknown to transformers
    config = type(config_of(network)).from_dict(config_of(network).to_dict())
    # on the meta device, to avoid allocating weights that are replaced right away
    with torch.device("meta"):
        plain: PreTrainedModel = type(network)(config)
    merged = dict(merged_weights(network) if weights is None else weights)
    buffers = dict(network.named_buffers())
    merged |= {name: buffers[name] for name in plain.state_dict().keys() & buffers.keys()}
    loaded = plain.load_state_dict(merged, strict=False, assign=True)
    # a tied lm_head gets its weight from the embedding
    assert set(loaded.missing_keys) <= {"lm_head.weight"}, loaded
    assert not loaded.unexpected_keys, loaded
    plain.tie_weights()
    return plain


def save_network(vlm: PolicyNetwork, folder: Path, weights: Weights | None = None) -> None:
    """Write the config and `weights` (by default with adapters merged) in the layout of hub files.

    generation_config.json lists the banned ids under `suppress_tokens`, so that transformers' generate samples from the
    distribution that was trained.
    """
    plain = plain_network(vlm.network, weights)
    plain.generation_config = copy.deepcopy(vlm.network.generation_config)
    assert plain.generation_config is not None
    plain.generation_config.suppress_tokens = list(vlm.banned_ids) or None
    save_in_hub_layout(plain, folder)


def save_in_hub_layout(network: PreTrainedModel, folder: Path) -> None:
    """Write config and weights of an unmodified transformers model in the layout of hub files."""
    tensors = network.state_dict()
    kind = config_of(network).model_type
    experts = {
        name: in_hub_layout(x).contiguous() if is_turned(name, kind) else x
        for name, x in tensors.items()
        if name.endswith(EXPERTS)
    }
    with no_progress_bar():
        if experts and not OLD:
            # otherwise transformers would transpose them again, or write one tensor per expert
            network.save_pretrained(folder, state_dict=tensors | experts, save_original_format=False)
        else:
            network.save_pretrained(folder)
