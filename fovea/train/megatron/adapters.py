"""LoRA on a Megatron model: the bridge's adapters, with the names and first values that peft gives them.

Megatron has one layer for queries, keys and values and one for gate and up; each of these projections gets an adapter
of its own, as with peft (the bridge's "canonical" LoRA).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
from megatron.bridge.peft.canonical_lora import CanonicalLoRA
from megatron.core import parallel_state
from torch import nn

from fovea.config.run import Lora
from fovea.models.modules import family_of_network
from fovea.models.trainable import ADAPTER, lora_layers

TARGETS = {
    "linear_qkv": ("linear_q", "linear_k", "linear_v"),
    "linear_proj": ("linear_proj",),
    "linear_fc1": ("linear_fc1_gate", "linear_fc1_up"),
    "linear_fc2": ("linear_fc2",),
}
"""The bridge's names of the projections in each of Megatron's layers; it takes all of a layer or none."""
PROJECTIONS = {
    "self_attn.q_proj": ("self_attention", "linear_qkv", "adapter_q"),
    "self_attn.k_proj": ("self_attention", "linear_qkv", "adapter_k"),
    "self_attn.v_proj": ("self_attention", "linear_qkv", "adapter_v"),
    "self_attn.o_proj": ("self_attention", "linear_proj", None),
    "mlp.gate_proj": ("mlp", "linear_fc1", "adapter_gate"),
    "mlp.up_proj": ("mlp", "linear_fc1", "adapter_up"),
    "mlp.down_proj": ("mlp", "linear_fc2", None),
}
"""Megatron's module and layer of each of transformers' projections, and its adapter where that layer has several."""


def add_adapters(module: Any, network: nn.Module, lora: Lora) -> None:
    """Add the adapters of `network` (peft's, by transformers' names) to this process's slice of the same model.

    All else is frozen. Projections that have no adapter in `network`, beside others of the same layer, get one that
    adds 0 and is not trained.
    """
    wanted = {PROJECTIONS[projection][1] for path in lora_layers(network) for projection in [_projection(path)]}
    targets = [f"language_model.*.{target}" for layer in sorted(wanted) for target in TARGETS[layer]]
    CanonicalLoRA(target_modules=targets, dim=lora.rank, alpha=lora.alpha)(module)
    _take_values(module, network)


@contextmanager
def adapters_off(module: Any) -> Iterator[None]:
    """Switch the adapters off in this context: the model is then the one that was loaded."""
    wrappers = [each for each in module.modules() if isinstance(each, AdapterWrapper)]
    for wrapper in wrappers:
        wrapper.disable_adapter_layers()
    try:
        yield
    finally:
        for wrapper in wrappers:
            wrapper.enable_adapter_layers()


@torch.no_grad()
def _take_values(module: Any, network: nn.Module) -> None:
    """Copy this process's slices of the matrices A and B of each of the network's adapters."""
    rank, size = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    given = lora_layers(network)
    for path, adapter in _adapters(module, f"{family_of_network(network).language_path}.layers"):
        # read for nothing but the form of checkpoints, where linear_fc1 stands for gate and up in one
        adapter.base_linear_name = path
        for part, linear in (("lora_A", adapter.linear_in), ("lora_B", adapter.linear_out)):
            linear.weight.requires_grad_(path in given)
            if path in given:
                whole = getattr(given[path], part)[ADAPTER].weight
                linear.weight.copy_(whole.chunk(size, dim=linear.weight.partition_dim)[rank])


def _adapters(module: Any, layers_path: str) -> Iterator[tuple[str, Any]]:
    """Transformers' paths of the projections in this process's layers, and their adapters."""
    for layer in module.language_model.decoder.layers:
        for projection, (owner, name, key) in PROJECTIONS.items():
            wrapper = getattr(getattr(layer, owner), name)
            if isinstance(wrapper, AdapterWrapper):
                adapter = wrapper.adapter if key is None else wrapper.adapter[key]
                yield f"{layers_path}.{layer.layer_number - 1}.{projection}", adapter


def _projection(path: str) -> str:
    """The last two parts of a path, such as mlp.up_proj."""
    return ".".join(path.split(".")[-2:])
