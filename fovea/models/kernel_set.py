"""The elementwise kernels of a decoder layer as one set: torch's here, Liger's in `models.kernels_liger`."""

from __future__ import annotations

from dataclasses import dataclass

from fovea.models.heads import Heads, heads
from fovea.models.kernels import Gate, RmsNormFunction, rms_norm, silu_times


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """RMSNorm of hidden states, norm and rotary positions of heads, and SwiGLU."""

    norm: RmsNormFunction
    heads: Heads
    gate: Gate


TORCH_KERNELS = Kernels(norm=rms_norm, heads=heads, gate=silu_times)
