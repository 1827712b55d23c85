"""Qwen2.5-VL (Bai et al., arXiv 2502.13923)."""

from __future__ import annotations

from typing import Any, ClassVar

from fovea.models.families.base import FastPath
from fovea.models.families.qwen_vl import QwenFastPath, QwenVL
from fovea.models.flops import VisionWork, vision_work
from fovea.types import PromptImage


class Qwen25VL(QwenVL):
    """ModelFamily of Qwen2.5-VL. Its vision tower has gated MLPs and windowed attention in most blocks."""

    __slots__ = ()
    model_type: ClassVar[str] = "qwen2_5_vl"
    video_processor: ClassVar[str] = "Qwen2VLVideoProcessor"
    fast_path: ClassVar[FastPath] = QwenFastPath(normed_heads=False, deepstack=False)

    def box_frame(self, image: PromptImage) -> tuple[int, int]:
        """Pixels of the image as the vision tower sees it (section 2.2)."""
        _, rows, columns = image.grid
        side = self.config.vision_config.patch_size
        return columns * side, rows * side

    def vision_work(self, vision: Any) -> VisionWork:
        whole = {index for index in vision.fullatt_block_indexes if index < vision.depth}
        return vision_work(
            vision,
            width=vision.hidden_size,
            mlp_weights=3 * vision.hidden_size * vision.intermediate_size,
            out_width=vision.out_hidden_size,
            windowed_layers=vision.depth - len(whole),
            # rounded down to a multiple of spatial_merge_size, as transformers does
            window_side=vision.window_size
            // vision.spatial_merge_size
            // vision.patch_size
            * vision.spatial_merge_size,
        )
