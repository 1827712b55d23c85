"""Qwen3.5: a Qwen3-VL tower without deepstack before a decoder whose layers are mostly gated delta nets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fovea.models.families.base import AttentionModules, DeltaModules, FastPath
from fovea.models.families.qwen_vl import VISION, Qwen3VL, QwenFastPath


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridFastPath(QwenFastPath):
    """FastPath of Qwen3.5, whose layers have attention or a gated delta net."""

    def mixer(self, module: Any) -> AttentionModules | DeltaModules:
        if module.block_type != "linear_attention":
            return super(HybridFastPath, self).mixer(module)
        net = module.linear_attn
        return DeltaModules(
            inputs=(net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a),
            output=net.out_proj,
            conv_C1K=net.conv1d.weight,
            log_rate_V=net.A_log,
            decay_bias_V=net.dt_bias,
            norm_F=net.norm.weight,
        )


class Qwen35(Qwen3VL):
    """ModelFamily of Qwen3.5."""

    __slots__ = ()
    model_type: ClassVar[str] = "qwen3_5"
    fast_path: ClassVar[FastPath] = HybridFastPath(normed_heads=True, deepstack=False)
    projector_paths: ClassVar[tuple[str, ...]] = (f"{VISION}.merger",)


class Qwen35Moe(Qwen35):
    """ModelFamily of Qwen3.5-MoE: Qwen3.5 with experts, one of them shared, in place of the decoder's MLPs."""

    __slots__ = ()
    model_type: ClassVar[str] = "qwen3_5_moe"
