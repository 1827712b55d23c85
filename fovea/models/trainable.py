"""Selection of trainable parameters: frozen parts, LoRA adapters or full weights.

LoRA (Hu et al., arXiv 2106.09685) comes from peft, whose adapters are injected into the network: module names stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from fovea.config.model import ALL_LINEAR, Lora, Model
from fovea.errors import TrainError
from fovea.models.adapter_files import load_adapter
from fovea.models.experts import Experts
from fovea.models.families.base import ModelFamily
from fovea.models.modules import base_model, family_of_network, language_model, projector_modules, vision_modules
from fovea.types import ParameterCount
from fovea.utils.checksum import bit_hash, read_hashes
from fovea_gym.errors import ConfigError

ADAPTER = "default"
LANGUAGE_MODEL, VISION_TOWER, PROJECTOR = "language model", "vision tower", "projector"
"""Parts of a model that `model.lora.parts` may name."""
VALUE_HEAD = "value_head."
"""Prefix of the names of a value head's parameters in a `models.policy_network.PolicyNetwork`."""


def choose_trainable(network: nn.Module, settings: Model, seed: int) -> None:
    """Freeze parameters as the `freeze_` settings and `lora` of `model` say, and add LoRA adapters."""
    if settings.lora is not None:
        _add_lora(network, settings.lora, seed)
    else:
        for module in vision_modules(network):
            module.requires_grad_(settings.trains_tower)
        # after the tower, since the projector may be part of it
        for module in projector_modules(network):
            module.requires_grad_(settings.trains_projector)
        for parameter in base_model(network).parameters(recurse=False):
            # LLaVA-OneVision's embedding for the end of an image row
            parameter.requires_grad_(settings.trains_projector)
    if settings.freeze_router:
        _freeze_routers(network)


def _freeze_routers(network: nn.Module) -> None:
    family = family_of_network(network)
    layers = [] if family.fast_path is None else map(family.fast_path.layer, language_model(network).layers)
    routers = [layer.mlp.router_XE for layer in layers if isinstance(layer.mlp, Experts)]
    if not routers:
        raise ConfigError(
            f"model.freeze_router=true, but a {family.model_type} has no experts to route to; remove the setting"
        )
    for router_XE in routers:
        router_XE.requires_grad_(False)


def _add_lora(network: nn.Module, lora: Lora, seed: int) -> None:
    """Add adapters to the linear layers that `lora.targets` names, and freeze everything else."""
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=_adapted_layers(network, lora),
        lora_dropout=lora.dropout,
        bias="none",
    )
    network.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, network, adapter_name=ADAPTER)
    # new modules are always in training mode, which would enable dropout in an evaluated network
    network.train(network.training)
    on_meta = any(parameter.is_meta for parameter in network.parameters() if parameter.requires_grad)
    # on the meta device only shapes are needed, so no values are read from disk
    if lora.adapter is not None and not on_meta:
        load_adapter(lora_layers(network), lora, ADAPTER)


def _adapted_layers(network: nn.Module, lora: Lora) -> list[str]:
    """Paths of the linear layers that get an adapter; ConfigError if a target or an exclusion matches no layer."""
    family, parts = family_of_network(network), {part.replace("_", " ") for part in lora.parts}
    linears = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    unused = [pattern for pattern in lora.exclude if not any(re.search(pattern, name) for name in linears)]
    if unused:
        example = next(name for name in linears if part_of(name, family) == LANGUAGE_MODEL)
        raise ConfigError(
            f"model.lora.exclude: {', '.join(unused)} matches no linear layer, such as {example}; correct it, or "
            "remove it"
        )
    # not the head: it is often tied to the embedding, and the engine would use the tied weight without the adapter
    named = [name for name in linears if part_of(name, family) in parts]
    if ALL_LINEAR not in lora.targets:
        named = [name for name in named if _leaf(name) in lora.targets]
    chosen = [name for name in named if not any(re.search(pattern, name) for pattern in lora.exclude)]
    unmatched = set(lora.targets) - {ALL_LINEAR} - {_leaf(name) for name in named}
    if unmatched or not chosen:
        raise ConfigError(
            f"model.lora.targets: {', '.join(sorted(unmatched or lora.targets))} with exclude={list(lora.exclude)} "
            f"matches no linear layer of the {' or '.join(sorted(parts))}; leave model.lora.targets out to adapt all "
            "of them (the experts of a mixture are not linear layers)"
        )
    return chosen


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def lora_layers(network: nn.Module) -> dict[str, LoraLayer]:
    """LoRA layers by module name; empty without LoRA."""
    return {name: module for name, module in network.named_modules() if isinstance(module, LoraLayer)}


@contextmanager
def adapters_off(network: nn.Module) -> Iterator[None]:
    """Disable the adapters in this context, which makes the model the reference policy."""
    layers = list(lora_layers(network).values())
    trained = list(trainable_parameters(network).values())
    for layer in layers:
        layer.enable_adapters(False)
    for parameter in trained:
        # peft freezes the adapters that it disables, and FSDP2 records in its first pass which parameters are frozen
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged_weights(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) of every parameter, with adapters merged.

    A weight without an adapter is the parameter itself, not a copy. Tied weights are yielded once.
    """
    return ((name, merged(parameter, adapter)) for name, parameter, adapter in adapted_weights(network))


def adapted_weights(network: nn.Module) -> Iterator[tuple[str, Tensor, LoraLayer | None]]:
    """(Hugging Face name, parameter, its adapter if it has one) of every parameter except those of adapters."""
    layers = lora_layers(network)
    for name, parameter in factored_weights(network):
        owner, _, leaf = name.rpartition(".")
        if ".lora_" not in name:
            yield name, parameter, layers.get(owner) if leaf == "weight" else None


def merged(parameter: Tensor, adapter: LoraLayer | None) -> Tensor:
    """The sum of a weight and its adapter's matrix, sharded like the weight; the weight itself without an adapter."""
    value = parameter.detach()
    if adapter is None:
        return value
    assert isinstance(adapter, LoraLinear), f"an adapter on a {type(adapter).__name__}"
    return value + adapter.get_delta_weight(ADAPTER).detach().to(value.dtype)


def factored_weights(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, parameter) of every parameter, with adapters separate from the base weights, and without copies.

    Names are Hugging Face's, or those of `adapter_names` for an adapter's matrices. Tied weights are yielded once.
    A trained parameter has `requires_grad`; a sharded one is a DTensor.
    """
    under_adapters = bool(lora_layers(network))
    for name, parameter in network.named_parameters():
        yield name.replace(".base_layer.", ".") if under_adapters else name, parameter


def weight_names(network: nn.Module) -> frozenset[str]:
    """The names of `factored_weights`."""
    return frozenset(name for name, _ in factored_weights(network))


def adapter_names(path: str) -> tuple[str, str]:
    """Names of the matrices A and B of the adapter on the linear layer at this path."""
    return f"{path}.lora_A.{ADAPTER}.weight", f"{path}.lora_B.{ADAPTER}.weight"


def adapter_scale(network: nn.Module) -> float:
    """The factor alpha / rank of all adapters of the network; 0 without adapters."""
    scales = {float(layer.scaling[ADAPTER]) for layer in lora_layers(network).values()}
    assert len(scales) <= 1, f"adapters of different scales: {sorted(scales)}"
    return scales.pop() if scales else 0.0


def count_parameters(network: nn.Module) -> list[ParameterCount]:
    """Parameter counts of vision tower, projector, language model, head and adapters, followed by the total."""
    counts: dict[str, list[int]] = {}
    family = family_of_network(network)
    for name, parameter in network.named_parameters():
        row = counts.setdefault(part_of(name, family), [0, 0])
        row[0] += parameter.numel() * parameter.requires_grad
        row[1] += parameter.numel()
    rows = [ParameterCount(part=part, trainable=n[0], total=n[1]) for part, n in counts.items()]
    return [
        *rows,
        ParameterCount(part="all", trainable=sum(row.trainable for row in rows), total=sum(row.total for row in rows)),
    ]


def part_of(name: str, family: ModelFamily) -> str:
    """The part of the model to which a module or parameter belongs, as in `count_parameters`."""
    if ".lora_" in name:
        return "LoRA adapters"
    if name.startswith(tuple(f"{path}." for path in family.projector_paths)):
        return PROJECTOR
    if name.startswith(tuple(f"{path}." for path in family.vision_paths)):
        return VISION_TOWER
    return "head" if name.startswith("lm_head") else LANGUAGE_MODEL


class FrozenGuard:
    """Detects changes of frozen parameters by hashing the bits of each one (of this rank's shard, if it is sharded)."""

    def __init__(self, network: nn.Module) -> None:
        self._hashes = _frozen_hashes(network)

    def check(self, network: nn.Module) -> None:
        """Raise TrainError with the name of the first frozen parameter that has changed, if there is one."""
        moved = [name for name, digest in _frozen_hashes(network).items() if self._hashes.get(name) != digest]
        if moved:
            raise TrainError(
                f"{len(moved)} frozen parameters changed, first {moved[0]}; a frozen part must not change: "
                "this is a bug, please report it with the run's config.yaml"
            )


def _frozen_hashes(network: nn.Module) -> dict[str, int]:
    frozen = {name: parameter for name, parameter in network.named_parameters() if not parameter.requires_grad}
    own = (parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in frozen.values())
    (hashes,) = read_hashes([bit_hash(tensor) for tensor in own])
    return dict(zip(frozen, hashes, strict=True))


def freeze_lm_head(network: PreTrainedModel) -> None:
    """Freeze the language-model head, which a value model does not use, unless it is tied to the embedding."""
    head: Any = network.get_output_embeddings()
    if head.weight is not network.get_input_embeddings().weight:
        head.requires_grad_(False)


def policy_parameters(vlm: nn.Module) -> Mapping[str, nn.Parameter]:
    """Trainable parameters of the policy by name, without those of its value head."""
    return {name: x for name, x in trainable_parameters(vlm).items() if not name.startswith(VALUE_HEAD)}


def value_parameters(vlm: nn.Module) -> Mapping[str, nn.Parameter]:
    """Parameters of the policy's value head by name; empty without a value head."""
    return {name: x for name, x in trainable_parameters(vlm).items() if name.startswith(VALUE_HEAD)}


def trainable_parameters(network: nn.Module) -> Mapping[str, nn.Parameter]:
    """Trainable parameters by name, in the network's order."""
    return {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
