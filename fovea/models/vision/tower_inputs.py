"""Inputs that a Qwen vision tower derives from the sizes of its images, computed on the host.

Given the sizes on a GPU, transformers' towers would compute the same inputs there and wait for the GPU several times.
The functions are transformers' own; a tower accepts their results as arguments instead of calling them.

Axes: `I` images.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fovea.models.transfer import to_device
from fovea.models.transformers_versions import OLD, vision_utils
from fovea.models.varlen import HeadShape, takes_varlen
from fovea.types import PromptImage

PASS_PATCHES = 16_384
"""Patches of a forward pass: 16 images of 512 px with patches of 16, enough to keep any GPU busy; at a width of 1,280,
the activations of a block in bfloat16 take about 0.5 GiB."""


def image_passes(images: Sequence[PromptImage], max_patches: int) -> Iterator[list[PromptImage]]:
    """The images in order, split into passes of at most `max_patches`; a larger image gets a pass to itself."""
    part: list[PromptImage] = []
    room = max_patches
    for image in images:
        patches = math.prod(image.grid)
        if part and patches > room:
            yield part
            part, room = [], max_patches
        part.append(image)
        room -= patches
    if part:
        yield part


OF_BLOCK, OF_RECOMPUTED_BLOCK, OF_MERGER, OF_EMBEDDING = 20, 1, 5, 2
"""Values kept per patch and unit of the tower's width: by a trained block, by a block that keeps only its input and
recomputes the rest, by a merger (its input, norm, both sides of its activation, and a margin) and by the patch
embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """Numbers of trained blocks in a tower; a frozen block keeps nothing for the backward pass."""

    trained: int
    """Blocks that keep their activations."""
    recomputed: int
    """Blocks that keep only their input and recompute the rest."""

    @classmethod
    def of(cls, blocks: Iterable[nn.Module]) -> BlockCounts:
        trained = [block for block in blocks if any(x.requires_grad for x in block.parameters())]
        recomputed = sum(bool(getattr(block, "gradient_checkpointing", False)) for block in trained)
        return cls(trained=len(trained) - recomputed, recomputed=recomputed)

    @property
    def total(self) -> int:
        return self.trained + self.recomputed


def graph_bytes(
    patches: int,
    width: int,
    itemsize: int,
    *,
    trained_blocks: int,
    recomputed_blocks: int,
    mergers: int,
    pixels: int,
) -> int:
    """Bytes of the graph of this many patches; `pixels` is the values per patch, 0 if the embedding is not trained."""
    blocks = OF_BLOCK * trained_blocks + OF_RECOMPUTED_BLOCK * recomputed_blocks
    numbers = blocks + OF_MERGER * mergers + (OF_EMBEDDING if pixels else 0)
    return patches * (numbers * width + pixels) * itemsize


LONGEST = {"cu_seqlens": "max_seqlen", "cu_window_seqlens": "max_window_seqlen"}
"""Names of the arguments for segment offsets, each with the argument for the longest segment's length."""


def tower_inputs(tower: Any, grids_I3: Tensor, heads: HeadShape) -> dict[str, Tensor | int]:
    """Arguments of the tower's forward besides pixels, from the grids of patches (time, height, width) on the host.

    Segment offsets are on the device if attention computes all segments in one call there; else they are on the host,
    which reads the length for each call.
    """
    if OLD:
        return {"grid_thw": to_device(grids_I3, heads.device)}
    offsets = {"cu_seqlens": vision_utils.get_vision_cu_seqlens(grids_I3)}
    indices = {"position_ids": vision_utils.get_vision_position_ids(grids_I3, tower.spatial_merge_size)}
    # Qwen2.5-VL has windows, Qwen3-VL has learned positions
    if hasattr(tower, "window_size"):
        indices["window_index"], offsets["cu_window_seqlens"] = vision_utils.get_vision_window_index(
            grids_I3, tower.spatial_merge_size, tower.window_size, tower.patch_size
        )
    if hasattr(tower, "num_grid_per_side"):
        indices["interp_indices"], indices["interp_weights"] = (
            vision_utils.get_vision_interpolation_indices_and_weights(
                grids_I3,
                tower.num_grid_per_side,
                mode=tower.interpolation_mode,
                align_corners=tower.interpolation_align_corners,
                spatial_merge_size=tower.spatial_merge_size,
            )
        )
    longest = {LONGEST[name]: int(x.diff().max()) for name, x in offsets.items()}
    place = heads.device if takes_varlen(heads) else torch.device("cpu")
    return {
        "grid_thw": grids_I3,
        **{name: to_device(x, heads.device) for name, x in indices.items()},
        **{name: to_device(x, place) for name, x in offsets.items()},
        **longest,
    }


def tower_heads(tower: Any, device: torch.device, dtype: torch.dtype) -> HeadShape:
    """Head shape of a tower that runs on this device in this type; each head has its own keys."""
    attention = tower.blocks[0].attn
    heads: int = attention.num_heads
    return HeadShape(device, dtype, heads, heads, attention.qkv.in_features // heads)
