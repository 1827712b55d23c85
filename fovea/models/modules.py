"""Where the modules of a network are: the same paths in all families so far."""

from __future__ import annotations

from typing import Any

from torch import nn


def vision_tower(network: nn.Module) -> nn.Module:
    """The vision tower of any family."""
    tower = network.get_submodule("model.visual")
    assert isinstance(tower, nn.Module)
    return tower


def language_model(network: nn.Module) -> Any:
    """The decoder stack of any family, without the head."""
    return network.get_submodule("model.language_model")


def config_of(module: nn.Module) -> Any:
    """The config that transformers keeps in a module; its fields differ by family."""
    return module.config
