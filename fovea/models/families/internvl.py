"""InternVL 3 and 3.5 (arXiv 2504.10479, 2508.18265): a tower on square tiles, pixel shuffle, a decoder of Qwen.

Axes: `L` token ids, `S` square tiles of an image with its thumbnail, 3 colours, `P` pixels along a tile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fovea.data.images import Size
from fovea.errors import ConfigError
from fovea.models.families.auto import AutoFamily
from fovea.models.families.base import ModelFamily
from fovea.models.families.hub_processor import HubProcessor, HubPrompts, load_hub_processor, prompt_image
from fovea.models.families.qwen_vl import PIXELS, QwenFastPath
from fovea.models.flops import VisionWork, Work, text_work
from fovea.models.transfer import to_device
from fovea.models.vision.feature_cache import ImageFeatures
from fovea.models.vision.tower_inputs import BlockCounts, graph_bytes
from fovea.types import PromptImage

VISION, PROJECTOR = "model.vision_tower", "model.multi_modal_projector"
HAS_HEAD_NORMS = {"qwen2": False, "qwen3": True}
"""By the decoders that the family knows, True if queries and keys are normalised per head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InternVL(HubPrompts):
    """ModelFamily of InternVL."""

    config: Any
    """Config of transformers."""
    model_type: ClassVar[str] = "internvl"
    vision_paths: ClassVar[tuple[str, ...]] = (VISION, PROJECTOR)
    projector_paths: ClassVar[tuple[str, ...]] = (PROJECTOR,)
    language_path: ClassVar[str] = "model.language_model"
    video_processor: ClassVar[None] = None

    @classmethod
    def of(cls, config: Any) -> ModelFamily:
        """The family for a transformers config; with another decoder than Qwen's, that of `model.family=auto`."""
        return cls(config=config) if config.text_config.model_type in HAS_HEAD_NORMS else AutoFamily.of(config)

    @property
    def fast_path(self) -> InternVLFastPath:
        return InternVLFastPath(normed_heads=HAS_HEAD_NORMS[self.config.text_config.model_type], deepstack=False)

    @property
    def image_token_id(self) -> int:
        return int(self.config.image_token_id)

    @property
    def work(self) -> Work:
        """FLOPs, the tower's without those of its class token."""
        vision, text = self.config.vision_config, self.config.text_config
        width, shuffled = vision.hidden_size, round(1 / self.config.downsample_ratio) ** 2
        block = 4 * width**2 + 2 * width * vision.intermediate_size
        embedding = vision.num_channels * vision.patch_size[0] * vision.patch_size[1] * width
        projector = width * text.hidden_size + text.hidden_size**2 / shuffled
        patch = 2.0 * (embedding + vision.num_hidden_layers * block + projector)
        return text_work(text, VisionWork(patch=patch, image_pair=4.0 * width * vision.num_hidden_layers))

    def load_image_processor(self, path: str, revision: str) -> HubProcessor:
        return load_hub_processor(self.config, path, revision)

    def image_options(self, _image_processor: Any, min_pixels: int | None, max_pixels: int | None) -> dict[str, Any]:
        if min_pixels or max_pixels:
            raise ConfigError(
                "model.min_pixels, model.max_pixels: InternVL makes tiles of one size of every image; leave them out, "
                "and set max_patches in the model's preprocessor_config.json for fewer tiles"
            )
        return {}

    def fewest_tokens(self, image_processor: HubProcessor, size: Size, _options: Mapping[str, Any]) -> int:
        return image_processor.num_tiles(size) * int(self.config.image_seq_length)

    def prompt_image(self, processed: Mapping[str, Any]) -> PromptImage:
        vision = self.config.vision_config
        rows, columns = (side // patch for side, patch in zip(vision.image_size, vision.patch_size, strict=True))
        return prompt_image(processed, self.image_token_id, (len(processed[PIXELS]), rows, columns))

    def box_frame(self, _image: PromptImage) -> tuple[int, int]:
        """Thousandths of the image's sides."""
        return 1000, 1000

    def forward_inputs(self, token_ids: Tensor, images: Sequence[PromptImage]) -> dict[str, Tensor]:
        return {PIXELS: tiles(images).to(token_ids.device)} if images else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class InternVLFastPath(QwenFastPath):
    """FastPath of InternVL: layers of Qwen2 or Qwen3, after a tower for which all tiles are one batch."""

    def encode(
        self, network: Any, images: Sequence[PromptImage], device: torch.device, dtype: torch.dtype
    ) -> list[ImageFeatures]:
        pixels = to_device(tiles(images).to(dtype), device)
        out = network.base_model.get_image_features(pixel_values=pixels)
        embeds_VD = getattr(out, "pooler_output", out).flatten(0, 1)
        sizes = [image.num_tokens for image in images]
        return [ImageFeatures(embeds_VD=embeds, deepstack_VD=()) for embeds in embeds_VD.split(sizes)]

    def activation_bytes(self, network: Any, images: Sequence[PromptImage]) -> int:
        tower = network.get_submodule(VISION)
        blocks = BlockCounts.of(tower.encoder.layer)
        pixels = sum(image.tensors[PIXELS].size for image in images)
        # with the class token of each tile
        patches = sum(tiles * (rows * columns + 1) for tiles, rows, columns in (image.grid for image in images))
        return graph_bytes(
            patches=patches,
            width=tower.config.hidden_size,
            itemsize=next(tower.parameters()).element_size(),
            trained_blocks=blocks.trained,
            recomputed_blocks=blocks.recomputed,
            mergers=1,
            pixels=pixels // max(patches, 1) if blocks.total else 0,
        )

    def segment_heads(self, _network: Any, _device: torch.device, _dtype: torch.dtype) -> None:
        return None


def tiles(images: Sequence[PromptImage]) -> Tensor:
    """Tiles [S, 3, P, P] of several images, on the host."""
    return torch.from_numpy(np.concatenate([image.tensors[PIXELS] for image in images]))
