"""Adapters of a network as peft's users have them, also under the names of other versions."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

from fovea.models.adapter_files import ADAPTER_WEIGHTS

OTHER_NAMES = [
    (r"model\.language_model\.", "model."),  # Qwen2-VL and Qwen2.5-VL before transformers 4.52
    (r"model\.language_model\.", "language_model.model."),  # LLaVA and most others before it
    (r"\.weight$", ".default.weight"),  # a state dict of training
    (r"\.weight$", ".policy.weight"),
    (r"^base_model\.model\.", ""),  # of an adapter that was injected without a PeftModel
]
"""(what peft's names of today have, what other files have in its place)."""


def save_adapter(network: nn.Module, folder: Path, **settings: object) -> None:
    """Add an adapter with random values to a network by peft, and save it."""
    modules = r".*language_model.*\.(q_proj|down_proj)"
    config = LoraConfig(**{"r": 4, "lora_alpha": 12, "target_modules": modules, **settings})  # type: ignore[arg-type]
    wrapped = get_peft_model(network, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    wrapped.save_pretrained(str(folder))


def rename_tensors(folder: Path, pattern: str, new: str) -> None:
    """Rename the tensors of an adapter's folder."""
    file = folder / ADAPTER_WEIGHTS
    save_file({re.sub(pattern, new, name): tensor for name, tensor in load_file(file).items()}, file)
