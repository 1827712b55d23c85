"""Inputs that a Qwen vision tower derives from the sizes of its images, computed on the host.

Given the sizes on a GPU, transformers' towers would compute the same there, and wait for it several times. The
functions are transformers' own, whose results a tower takes as arguments in place of calling them.

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
the activations of a block in bfloat16 take some 0.5 GiB."""


def image_passes(images: Sequence[PromptImage], max_patches: int) -> Iterator[list[PromptImage]]:
    """The images in their order, split into passes of at most so many patches; a larger image has one to itself."""
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
"""Numbers per patch and unit of the tower's width: of a trained block, of one that computes all but its input again, of
a merger (its input, norm, and both sides of its activation, and some) and of the patch embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """Numbers of the blocks of a tower whose graph a backward pass needs; a frozen block keeps nothing."""

    trained: int
    """Blocks that keep their activations."""
    recomputed: int
    """Blocks that keep their input and compute the rest again."""

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
    """Bytes of the graph of so many patches; `pixels` are the numbers of one, 0 where the embedding is not trained."""
    blocks = OF_BLOCK * trained_blocks + OF_RECOMPUTED_BLOCK * recomputed_blocks
    numbers = blocks + OF_MERGER * mergers + (OF_EMBEDDING if pixels else 0)
    return patches * (numbers * width + pixels) * itemsize


LONGEST = {"cu_seqlens": "max_seqlen", "cu_window_seqlens": "max_window_seqlen"}
"""Argument for the length of the longest segment, by that for the offsets."""


def tower_inputs(tower: Any, grids_I3: Tensor, heads: HeadShape) -> dict[str, Tensor | int]:
    """Arguments of the tower's forward besides pixels, from the grids of patches (time, height, width) on the host.

    Offsets of segments are on the device where its one call for all segments reads them, else on the host, where the
    lengths of the calls one by one are read.
    """
    if OLD:
        return {"grid_thw": to_device(grids_I3, heads.device)}
    offsets = {"cu_seqlens": vision_utils.get_vision_cu_seqlens(grids_I3)}
    indices = {"position_ids": vision_utils.get_vision_position_ids(grids_I3, tower.spatial_merge_size)}
    # each by what its tower has: windows in Qwen2.5-VL, learned positions in Qwen3-VL
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
    """The heads of a tower that runs on this device in this type, each of which has its own keys."""
    attention = tower.blocks[0].attn
    heads: int = attention.num_heads
    return HeadShape(device, dtype, heads, heads, attention.qkv.in_features // heads)
