"""Image features, the output of the vision tower.

Axes: `V` visual tokens (merged patches), `D` width of the language model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFeatures:
    """Features of one image, or of several concatenated."""

    embeds_VD: Tensor
    """Replaces the embeddings of the visual tokens."""
    deepstack_VD: tuple[Tensor, ...] = ()
    """Added to the hidden states after the first decoder layers (Qwen3-VL)."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, the embeddings first."""
        return (self.embeds_VD, *self.deepstack_VD)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.numel() * x.element_size() for x in self.tensors)

    def map(self, change: Callable[[Tensor], Tensor]) -> ImageFeatures:
        """Features with a function applied to every tensor."""
        return ImageFeatures(embeds_VD=change(self.embeds_VD), deepstack_VD=tuple(map(change, self.deepstack_VD)))


def concatenate(features: Sequence[ImageFeatures]) -> ImageFeatures:
    """Features of several images concatenated along their visual tokens."""
    layers = zip(*(feature.deepstack_VD for feature in features), strict=True)
    return ImageFeatures(
        embeds_VD=torch.cat([feature.embeds_VD for feature in features]),
        deepstack_VD=tuple(torch.cat(layer) for layer in layers),
    )
