"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: the same prompts and positions, different networks.

Axes: `L` token ids, `N` patches of an image, `C` values of a patch, 3 = time, height, width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from fovea.types import PromptImage

IMAGE_PAD = "<|image_pad|>"
PIXELS, GRID = "pixel_values", "image_grid_thw"
"""Tensors of an image: float32 [N, C], and int64 [3] patches in time, height and width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenVL:
    """A Qwen-VL; `models.families.base.ModelFamily` documents the methods."""

    model_type: str
    image_token_id: int
    merge_size: int
    """Patches along each side of one visual token."""

    @staticmethod
    def of(config: Any) -> QwenVL:
        """From the config of transformers."""
        return QwenVL(
            model_type=config.model_type,
            image_token_id=config.image_token_id,
            merge_size=config.vision_config.spatial_merge_size,
        )

    @property
    def image_token(self) -> str:
        return IMAGE_PAD

    def load_image_processor(self, path: str, revision: str) -> Qwen2VLImageProcessorPil:
        processor: Qwen2VLImageProcessorPil = Qwen2VLImageProcessorPil.from_pretrained(path, revision=revision)
        return processor

    def image_options(self, image_processor: Any, min_pixels: int | None, max_pixels: int | None) -> dict[str, Any]:
        return {"size": pixel_limits(image_processor.size, min_pixels, max_pixels)}

    def prompt_image(self, processed: Mapping[str, Any]) -> PromptImage:
        pixels_NC = np.ascontiguousarray(processed[PIXELS], dtype=np.float32)
        grid = np.asarray(processed[GRID][0], dtype=np.int64)
        key = hashlib.blake2b(pixels_NC.tobytes(), digest_size=16, person=f"{grid[1]}x{grid[2]}".encode()[:16])
        return PromptImage(
            key=key.hexdigest(),
            tensors={PIXELS: pixels_NC, GRID: grid},
            num_tokens=int(grid.prod()) // self.merge_size**2,
        )

    def image_ids(self, image: PromptImage) -> NDArray[np.int64]:
        return np.full(image.num_tokens, self.image_token_id)

    def positions(
        self, token_ids_L: NDArray[np.int64], images: Sequence[PromptImage], start: int
    ) -> tuple[NDArray[np.int64], int]:
        """M-RoPE (Qwen2-VL, arXiv 2409.12191, section 2.1), as transformers' `get_rope_index` gives it.

        Text rises by one on all axes; an image keeps time still and spreads height and width over its merged grid;
        the text after it goes on at the largest position so far plus one.
        """
        length = len(token_ids_L)
        if not images:
            return np.arange(start, start + length)[None].repeat(3, axis=0), start + length
        pads = np.flatnonzero(token_ids_L == self.image_token_id)
        assert len(pads) == sum(image.num_tokens for image in images), f"{len(pads)} pads for {len(images)} images"
        positions_3L = np.empty((3, length), dtype=np.int64)
        token, pad = 0, 0
        for image in images:
            first = int(pads[pad])
            positions_3L[:, token:first] = np.arange(start, start + first - token)
            start += first - token
            token, pad = first + image.num_tokens, pad + image.num_tokens
            time, height, width = image.tensors[GRID].tolist()
            offsets_3V = _grid_offsets(time, height // self.merge_size, width // self.merge_size)
            np.add(offsets_3V, start, out=positions_3L[:, first:token])
            start += max(height, width) // self.merge_size
        positions_3L[:, token:] = np.arange(start, start + length - token)
        return positions_3L, start + length - token


@lru_cache(maxsize=256)  # most data sets have few image sizes; at 10,000 visual tokens each an entry holds 240 kB
def _grid_offsets(time: int, height: int, width: int) -> NDArray[np.int64]:
    offsets_3V = np.indices((time, height, width), dtype=np.int64).reshape(3, -1)
    offsets_3V.setflags(write=False)
    return offsets_3V


def pixel_limits(own: Any, min_pixels: int | None, max_pixels: int | None) -> dict[str, int]:
    """The processor's names for the limits; a limit that is set takes precedence over the model's own other one."""
    smallest = min_pixels or min(own["shortest_edge"], max_pixels or own["shortest_edge"])
    largest = max_pixels or max(own["longest_edge"], min_pixels or own["longest_edge"])
    return {"shortest_edge": smallest, "longest_edge": largest}
