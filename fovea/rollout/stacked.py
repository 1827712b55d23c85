"""The processed images of a prompt together, as image processors return them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fovea.types import PromptImage


def stacked(images: Sequence[PromptImage]) -> dict[str, Tensor]:
    """Patches [patches of all images, values] and grids [images, 3] of some images, by transformers' names."""
    return {
        name: torch.from_numpy(np.concatenate([np.atleast_2d(image.tensors[name]) for image in images]))
        for name in ("pixel_values", "image_grid_thw")
    }
