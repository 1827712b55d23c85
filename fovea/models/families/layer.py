"""Modules of a decoder layer under names that are the same for all families."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerModules:
    """Modules of a pre-norm decoder layer with a gated MLP."""

    input_norm: nn.Module
    query: nn.Module
    key: nn.Module
    value: nn.Module
    query_norm: nn.Module | None
    """Norm of each query head; None in families that do not normalise queries and keys."""
    key_norm: nn.Module | None
    output: nn.Module
    post_norm: nn.Module
    gate: nn.Module
    up: nn.Module
    down: nn.Module
