"""What a Qwen vision tower derives from the sizes of its images, computed on the host.

Given the sizes on a GPU, transformers' towers would compute the same there, and wait for it several times. The
functions are transformers' own, whose results a tower takes as arguments in place of calling them.

Axes: `I` images.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fovea.models.transfer import to_device
from fovea.models.transformers_versions import OLD, vision_utils
from fovea.models.varlen import HeadShape, takes_varlen

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
    """The heads of a tower that runs on this device in this type, each of which has keys of its own."""
    attention = tower.blocks[0].attn
    heads: int = attention.num_heads
    return HeadShape(device, dtype, heads, heads, attention.qkv.in_features // heads)
