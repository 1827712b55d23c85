"""Families that use transformers' processor, with facts that a model's files do not contain; most have a fast path.

Axes: `V` visual tokens, `D` width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import Idefics3Processor
from transformers.processing_utils import ProcessorMixin

from fovea.models.families.auto import AutoFamily
from fovea.models.families.base import FastPath, ModelFamily
from fovea.models.families.hub_processor import HubProcessor, load_hub_processor
from fovea.models.families.qwen_vl import QwenFastPath, grid_positions
from fovea.models.transfer import to_device
from fovea.models.vision.feature_cache import ImageFeatures
from fovea.models.vision.tower_inputs import BlockCounts, graph_bytes
from fovea.types import PromptImage
from fovea_gym.rows.images import Size

HAS_HEAD_NORMS = {
    "llama": False,
    "mistral": False,
    "qwen2": False,
    "qwen3": True,
    "glm4v_text": False,
    "glm4v_moe_text": False,
}
"""The decoders that the fast path supports; True if queries and keys are normalised per head."""


class RowsProcessor(ProcessorMixin):
    """Processor of Mistral 3 that does not need torchvision, which transformers' PixtralProcessor imports.

    It writes the visual tokens of an image in rows, with one token between two rows and another after the last row.
    """

    def __init__(
        self,
        image_processor: Any,
        tokenizer: Any,
        patch_size: int = 16,
        spatial_merge_size: int = 1,
        image_token: str = "[IMG]",
        image_break_token: str = "[IMG_BREAK]",
        image_end_token: str = "[IMG_END]",
        **options: Any,
    ) -> None:
        """Take sizes and marks as in processor_config.json; a visual token is `spatial_merge_size` patches wide."""
        super().__init__(image_processor, tokenizer, **options)  # type: ignore[no-untyped-call]
        self.side_px = patch_size * spatial_merge_size
        self.image_token, self.row_end, self.image_end = image_token, image_break_token, image_end_token
        self.image_token_id = tokenizer.convert_tokens_to_ids(image_token)

    def _process_images(self, images: Any, **options: Any) -> Any:
        # sides are rounded to whole visual tokens
        return super()._process_images(images, **options | {"patch_size": self.side_px})

    def replace_image_token(self, image_inputs: Mapping[str, Any], image_idx: int, **_options: Any) -> str:
        """The text that replaces an image's mark."""
        rows, columns = (int(side) // self.side_px for side in image_inputs["image_sizes"][image_idx])
        return self.row_end.join([self.image_token * columns] * rows) + self.image_end


@dataclass(frozen=True, kw_only=True)
class NamedFamily(AutoFamily):
    """ModelFamily of a named model type, with a fast path if its decoder is in `HAS_HEAD_NORMS`."""

    frame: tuple[int, int] | None = None
    """Width and height of the coordinate system in which the model localises; None if it does not."""
    processor: type | None = None
    """Class of its processor if transformers' own needs packages that are only for videos, else None."""

    @classmethod
    def of(cls, config: Any, frame: tuple[int, int] | None = None, processor: type | None = None) -> NamedFamily:
        """The family for a transformers config."""
        return cls(config=config, frame=frame, processor=processor)

    @property
    def plain_reason(self) -> str:
        """The feature of the decoder that the fast path does not support; empty if it supports all."""
        text = self.config.text_config
        if text.model_type not in HAS_HEAD_NORMS:
            return PLAIN_DECODERS.get(text.model_type, f"a decoder of {text.model_type}")
        return "" if getattr(text, "sliding_window", None) is None else "sliding windows"

    @property
    def fast_path(self) -> FastPath | None:  # type: ignore[override]
        if self.plain_reason:
            return None
        return TilesFastPath(normed_heads=HAS_HEAD_NORMS[self.config.text_config.model_type], family=self)

    def load_image_processor(self, path: str, revision: str) -> HubProcessor:
        if self.processor is None:
            return super().load_image_processor(path, revision)
        return load_hub_processor(self.processor, path, revision)

    def fewest_tokens(self, image_processor: HubProcessor, size: Size, _options: Mapping[str, Any]) -> int:
        return image_processor.num_tokens(size)

    def box_frame(self, _image: PromptImage) -> tuple[int, int] | None:  # type: ignore[override]
        return self.frame


class GridFamily(NamedFamily):
    """NamedFamily whose visual tokens have M-RoPE positions, as in Qwen2-VL."""

    def positions(
        self, token_ids_L: NDArray[np.int64], images: Sequence[PromptImage], start: int
    ) -> tuple[NDArray[np.int64], int]:
        return grid_positions(
            token_ids_L == self.image_token_id, images, start, self.config.vision_config.spatial_merge_size
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TilesFastPath(QwenFastPath):
    """FastPath of a decoder with transformers' usual module names, and of a vision tower that batches tiles."""

    family: NamedFamily
    deepstack: bool = False

    def encode(
        self, network: Any, images: Sequence[PromptImage], device: torch.device, dtype: torch.dtype
    ) -> list[ImageFeatures]:
        inputs = {
            name: to_device(x.to(dtype) if x.is_floating_point() else x, device)
            for name, x in self.family.image_inputs(images).items()
        }
        out = network.base_model.get_image_features(**inputs)
        # a list has one tensor per image or per tile
        embeds_VD = torch.cat(list(getattr(out, "pooler_output", out)))
        sizes = [image.num_tokens for image in images]
        return [ImageFeatures(embeds_VD=embeds, deepstack_VD=()) for embeds in embeds_VD.split(sizes)]

    def activation_bytes(self, network: Any, images: Sequence[PromptImage]) -> int:
        tower = network.get_submodule(self.family.vision_paths[0])
        lists = [list(x) for x in tower.modules() if isinstance(x, nn.ModuleList)]
        longest = max(lists, key=len)
        blocks = BlockCounts.of(longest)
        patches = sum(math.prod(image.grid) for image in images)
        pixels = sum(x.numel() for x in self.family.image_inputs(images).values())
        return graph_bytes(
            patches=patches,
            width=self.family.config.vision_config.hidden_size,
            itemsize=next(tower.parameters()).element_size(),
            trained_blocks=blocks.trained,
            recomputed_blocks=blocks.recomputed,
            mergers=1,
            pixels=pixels // max(patches, 1) if blocks.total else 0,
        )

    def segment_heads(self, _network: Any, _device: torch.device, _dtype: torch.dtype) -> None:
        return None


SEEING = "image tokens attend to later ones"
PLAIN_DECODERS = {"gemma3_text": SEEING, "gemma4_text": SEEING}
"""Reasons for using the plain path, by decoder."""
THOUSANDTHS = (1000, 1000)
NAMED: dict[str, Callable[[Any], ModelFamily]] = {
    "internvl": partial(NamedFamily.of, frame=THOUSANDTHS),
    "llava_onevision": NamedFamily.of,
    "idefics3": partial(NamedFamily.of, processor=Idefics3Processor),
    "smolvlm": partial(NamedFamily.of, processor=Idefics3Processor),
    "mistral3": partial(NamedFamily.of, processor=RowsProcessor),
    "glm4v": partial(GridFamily.of, frame=THOUSANDTHS),
    "glm4v_moe": partial(GridFamily.of, frame=THOUSANDTHS),
    "glm46v": partial(GridFamily.of, frame=THOUSANDTHS),
    "gemma3": NamedFamily.of,
    "gemma4": NamedFamily.of,
}
"""Constructors of families by `model_type`."""
