"""The modules of a decoder layer, under one set of names for all families."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerModules:
    """A pre-norm decoder layer with a gated MLP."""

    input_norm: nn.Module
    query: nn.Module
    key: nn.Module
    value: nn.Module
    query_norm: nn.Module | None
    """Per head, in families that normalise queries and keys."""
    key_norm: nn.Module | None
    output: nn.Module
    post_norm: nn.Module
    gate: nn.Module
    up: nn.Module
    down: nn.Module
