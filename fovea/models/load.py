"""Loads the network of a model folder or hub id."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel

from fovea.config.run import Model
from fovea.errors import ModelError
from fovea.models.model_files import WHOLE_MODEL, check_folder, damaged_model, hub_options, no_progress_bar
from fovea.models.transformers_versions import load_config
from fovea.utils.config_keys import check_config_keys, check_unquantized

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def pick_device(wanted: str) -> torch.device:
    """The device that `model.device` names; auto is cuda where there is one."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ModelError("model.device=cuda, but torch sees no CUDA device; set model.device=auto or cpu")
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(wanted)


def empty_network(settings: Model) -> PreTrainedModel:
    """The network of `model.path` on the meta device, in evaluation mode; of its files only the config is read."""
    assert settings.path is not None, "a tiny model is loaded from the folder that it was written to"
    with damaged_model(settings.path), torch.device("meta"):
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
    # transformers initialises missing weights at random, with no more than a warning
    wrong = sorted({*info["missing_keys"], *(str(key) for key in info.get("mismatched_keys", ()))})
    if wrong:
        raise ModelError(
            f"model.path={path}: its weights lack {len(wrong)} tensors or have them in another size, first {wrong[0]}; "
            f"{WHOLE_MODEL}"
        )
    network.eval()
    return network
