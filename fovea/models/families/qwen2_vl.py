"""Qwen2-VL (Wang et al., arXiv 2409.12191)."""

from __future__ import annotations

from typing import Any, ClassVar

from fovea.models.families.base import FastPath
from fovea.models.families.qwen_vl import QwenFastPath, QwenVL
from fovea.models.flops import VisionWork, vision_work


class Qwen2VL(QwenVL):
    """ModelFamily of Qwen2-VL. Its vision tower has plain MLPs, and its config calls their width `embed_dim`."""

    __slots__ = ()
    model_type: ClassVar[str] = "qwen2_vl"
    video_processor: ClassVar[str] = "Qwen2VLVideoProcessor"
    fast_path: ClassVar[FastPath] = QwenFastPath(normed_heads=False, deepstack=False)

    def vision_work(self, vision: Any) -> VisionWork:
        width = vision.embed_dim
        mlp = 2 * width * int(width * vision.mlp_ratio)
        return vision_work(vision, width=width, mlp_weights=mlp, out_width=vision.hidden_size)
