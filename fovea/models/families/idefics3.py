"""Idefics 3 (Laurençon et al., arXiv 2408.12637): SigLIP tower, pixel shuffle, Llama decoder. No fast path yet.

Axes: `L` token ids, `S` square tiles of an image (one without splitting), 3 colours, `P` pixels along a tile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fovea.data.images import Size
from fovea.errors import ConfigError
from fovea.models.families.base import FastPath, RisingPositions
from fovea.models.flops import VisionWork, Work, text_work
from fovea.models.transformers_versions import image_processor_class
from fovea.types import PromptImage

IMAGE = "<image>"
PIXELS, MASK = "pixel_values", "pixel_attention_mask"
"""Names of an image's tensors float32 [S, 3, P, P] and int64 [S, P, P], which are inputs of transformers' forward."""
SPLIT = "rows_and_columns"
"""Name of an image's tensor int64 [2]: numbers of tiles along height and width; zeros if it is not split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Idefics3(RisingPositions):
    """ModelFamily of Idefics 3."""

    config: Any
    """Config of transformers."""
    model_type: ClassVar[str] = "idefics3"
    vision_paths: ClassVar[tuple[str, ...]] = ("model.vision_model", "model.connector")
    projector_paths: ClassVar[tuple[str, ...]] = ("model.connector",)
    language_path: ClassVar[str] = "model.text_model"
    video_processor: ClassVar[None] = None
    fast_path: ClassVar[FastPath | None] = None

    @classmethod
    def of(cls, config: Any) -> Idefics3:
        """The family for a transformers config."""
        if config.text_config.model_type != "llama":
            # any decoder of transformers could be named here, also one whose kernels come from the hub
            raise ConfigError(
                f"text_config.model_type={config.text_config.model_type} in the model's config.json: Fovea knows "
                "Idefics 3 with a decoder of llama; give such a model"
            )
        return cls(config=config)

    @property
    def image_token_id(self) -> int:
        return int(self.config.image_token_id)

    @property
    def tile_tokens(self) -> int:
        """Number of visual tokens of a tile, after the pixel shuffle."""
        vision = self.config.vision_config
        return int((vision.image_size // vision.patch_size // self.config.scale_factor) ** 2)

    @property
    def work(self) -> Work:
        vision, text = self.config.vision_config, self.config.text_config
        width, shuffled = vision.hidden_size, vision.hidden_size * self.config.scale_factor**2
        block = 4 * width**2 + 2 * width * vision.intermediate_size
        embedding = vision.num_channels * vision.patch_size**2 * width
        connector = shuffled * text.hidden_size / self.config.scale_factor**2
        patch = 2.0 * (embedding + vision.num_hidden_layers * block + connector)
        return text_work(text, VisionWork(patch=patch, image_pair=4.0 * width * vision.num_hidden_layers))

    def load_image_processor(self, path: str, revision: str) -> Any:
        return image_processor_class("Idefics3ImageProcessor").from_pretrained(path, revision=revision)

    def image_options(self, _image_processor: Any, min_pixels: int | None, max_pixels: int | None) -> dict[str, Any]:
        if min_pixels or max_pixels:
            raise ConfigError(
                "model.min_pixels, model.max_pixels: Idefics 3 makes tiles of one size of every image; leave them out"
            )
        return {"return_row_col_info": True}

    def fewest_tokens(self, image_processor: Any, size: Size, _options: Mapping[str, Any]) -> int:
        width, height = size
        # 0 for an image that stays whole; the tokens around the tiles are not counted
        tiles, _, _ = image_processor.get_number_of_image_patches(height, width)
        return max(int(tiles), 1) * self.tile_tokens

    def prompt_image(self, processed: Mapping[str, Any]) -> PromptImage:
        pixels = np.ascontiguousarray(processed[PIXELS][0], dtype=np.float32)
        split = np.array([processed["rows"][0][0], processed["cols"][0][0]])
        key = hashlib.blake2b(pixels.tobytes(), digest_size=16, person=f"{split[0]}x{split[1]}".encode())
        tensors = {PIXELS: pixels, MASK: np.asarray(processed[MASK][0]), SPLIT: split}
        side = self.config.vision_config.image_size // self.config.vision_config.patch_size
        return PromptImage(
            key=key.hexdigest(),
            tensors=tensors,
            num_tokens=len(pixels) * self.tile_tokens,
            grid=(len(pixels), side, side),
        )

    def box_frame(self, _image: PromptImage) -> None:
        """Nothing: the family was not taught to give coordinates."""
        return None

    def image_mark(self, _image_processor: Any) -> str:
        return IMAGE

    def image_text(self, image: PromptImage) -> str:
        rows, columns = image.tensors[SPLIT].tolist()
        tile = IMAGE * self.tile_tokens
        around = "<fake_token_around_image>"
        tiles = [
            "".join(f"{around}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        return "".join(tiles) + ("\n" if tiles else "") + f"{around}<global-img>{tile}{around}"

    def forward_inputs(self, token_ids: Tensor, images: Sequence[PromptImage]) -> dict[str, Tensor]:
        if not images:
            return {}
        # transformers takes [rows, tiles of a row, ...], flattens both axes and drops empty tiles: one row of all tiles
        # gives the same
        return {
            name: torch.from_numpy(np.concatenate([image.tensors[name] for image in images]))[None].to(token_ids.device)
            for name in (PIXELS, MASK)
        }
