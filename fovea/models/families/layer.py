"""Modules of a decoder layer under names that are the same for all families."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fovea.models.experts import Experts


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpModules:
    """Modules of a gated MLP."""

    gate: nn.Module
    up: nn.Module
    down: nn.Module


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerModules:
    """Modules of a pre-norm decoder layer."""

    input_norm: nn.Module
    query: nn.Module
    key: nn.Module
    value: nn.Module
    query_norm: nn.Module | None
    """Norm of each query head; None in families that do not normalise queries and keys."""
    key_norm: nn.Module | None
    output: nn.Module
    post_norm: nn.Module
    mlp: MlpModules | Experts
    """Experts as the tensors that their modules hold now, which FSDP2 exchanges around every pass."""
