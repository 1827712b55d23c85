"""Submodules of a network, found by the module paths of its family."""

from __future__ import annotations

from typing import Any

from torch import nn

from fovea.models.families.base import ModelFamily
from fovea.models.families.registry import family_of


def family_of_network(network: nn.Module) -> ModelFamily:
    """Model family of a transformers network."""
    return family_of(config_of(network), str(config_of(network).name_or_path))


def vision_modules(network: nn.Module) -> list[nn.Module]:
    """Modules that compute image features: the vision tower, and the projector if it is a separate module."""
    return [network.get_submodule(path) for path in family_of_network(network).vision_paths]


def projector_modules(network: nn.Module) -> list[nn.Module]:
    """Modules that turn the vision tower's output into visual tokens."""
    return [network.get_submodule(path) for path in family_of_network(network).projector_paths]


def vision_tower(network: nn.Module) -> nn.Module:
    """The vision tower, without a separate projector."""
    return vision_modules(network)[0]


def language_model(network: nn.Module) -> Any:
    """The decoder stack without the language-model head."""
    return network.get_submodule(family_of_network(network).language_path)


def config_of(module: nn.Module) -> Any:
    """The transformers config of a module; its fields differ by family."""
    return module.config


def base_model(network: nn.Module) -> nn.Module:
    """The model without its language-model head."""
    of: Any = network
    base: nn.Module = of.base_model
    return base
