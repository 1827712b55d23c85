"""The parts of a network, by the module paths of its family."""

from __future__ import annotations

from typing import Any

from torch import nn

from fovea.models.families.base import ModelFamily
from fovea.models.families.registry import family_of


def family_of_network(network: nn.Module) -> ModelFamily:
    """The family of a network of transformers."""
    return family_of(config_of(network), str(config_of(network).name_or_path))


def vision_modules(network: nn.Module) -> list[nn.Module]:
    """The modules that make image features: the vision tower, and a projector where that is apart."""
    return [network.get_submodule(path) for path in family_of_network(network).vision_paths]


def vision_tower(network: nn.Module) -> nn.Module:
    """The first of these."""
    return vision_modules(network)[0]


def language_model(network: nn.Module) -> Any:
    """The decoder stack, without the head."""
    return network.get_submodule(family_of_network(network).language_path)


def config_of(module: nn.Module) -> Any:
    """The config that transformers keeps in a module; its fields differ by family."""
    return module.config
