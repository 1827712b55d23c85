"""Qwen3-VL (arXiv 2511.21631)."""

from __future__ import annotations

from typing import Any, ClassVar

from fovea.models.families.base import FastPath
from fovea.models.families.qwen_vl import VISION, QwenFastPath, QwenVL
from fovea.models.flops import VisionWork, vision_work


class Qwen3VL(QwenVL):
    """ModelFamily of Qwen3-VL. Its decoder normalises queries and keys per head and has deepstack vision features."""

    __slots__ = ()
    model_type: ClassVar[str] = "qwen3_vl"
    video_processor: ClassVar[str] = "Qwen3VLVideoProcessor"
    fast_path: ClassVar[FastPath] = QwenFastPath(normed_heads=True, deepstack=True)
    projector_paths: ClassVar[tuple[str, ...]] = (f"{VISION}.merger", f"{VISION}.deepstack_merger_list")

    def vision_work(self, vision: Any) -> VisionWork:
        return vision_work(
            vision,
            width=vision.hidden_size,
            mlp_weights=2 * vision.hidden_size * vision.intermediate_size,
            out_width=vision.out_hidden_size,
            mergers=1 + len(vision.deepstack_visual_indexes),
        )
