"""Occlusion maps show where a picture matters for an answer (Zeiler and Fergus, arXiv 1311.2901).

One patch at a time is painted in the mean colour of the picture, and the log-prob of the answer is computed again.

Axes: `R`, `C` rows and columns of patches; `Y`, `X` pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_DIM = 0.3
"""Brightness of the grey areas that the answer does not depend on."""


@dataclass(frozen=True, slots=True)
class Patch:
    """A patch that hides a square of a picture (`ImageRef.change`)."""

    top: int
    left: int
    side: int

    def __call__(self, pixels_YXC: NDArray[np.uint8]) -> NDArray[np.uint8]:
        hidden_YXC = pixels_YXC.copy()
        place = np.s_[self.top : self.top + self.side, self.left : self.left + self.side]
        hidden_YXC[place] = pixels_YXC.mean(axis=(0, 1)).round()
        return hidden_YXC


@dataclass(frozen=True, slots=True, kw_only=True)
class OcclusionMap:
    """The log-prob of an answer, and its drop for each hidden patch of the picture."""

    logprob: float
    falls_RC: NDArray[np.float32]
    """Drops in nats; below 0 where the answer is more likely without the patch."""
    side_px: int

    def over(self, picture: Image.Image) -> Image.Image:
        """The picture, lit in proportion to the drop of each patch, and dim grey where there is none."""
        side, (width, height) = self.side_px, picture.size
        share_RC = self.falls_RC.clip(0) / max(float(self.falls_RC.max()), 1e-9)
        share_YX1 = share_RC.repeat(side, axis=0).repeat(side, axis=1)[:height, :width, None]
        lit_YXC = np.asarray(picture.convert("RGB"), np.float32)
        dim_YX1 = _DIM * lit_YXC.mean(axis=2, keepdims=True)
        return Image.fromarray((dim_YX1 + share_YX1 * (lit_YXC - dim_YX1)).round().astype(np.uint8))


def patches(size: tuple[int, int], side_px: int) -> list[list[Patch]]:
    """Rows of patches that cover a picture of this width and height."""
    width, height = size
    return [[Patch(top, left, side_px) for left in range(0, width, side_px)] for top in range(0, height, side_px)]
