"""What the vision tower makes of images, and a bounded memory of it while the tower is frozen.

Axes: `V` visual tokens (merged patches), `D` width of the language model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fovea.types import PromptImage


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFeatures:
    """One image, or several one after the other."""

    embeds_VD: Tensor
    """Stands in for the embeddings of the image pads."""
    deepstack_VD: tuple[Tensor, ...] = ()
    """Added to the hidden states after the first decoder layers (Qwen3-VL)."""

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.embeds_VD, *self.deepstack_VD))


Encode = Callable[[Sequence[PromptImage]], Sequence[ImageFeatures]]


def concatenate(features: Sequence[ImageFeatures]) -> ImageFeatures:
    """Several images as one run of visual tokens."""
    layers = zip(*(feature.deepstack_VD for feature in features), strict=True)
    return ImageFeatures(
        embeds_VD=torch.cat([feature.embeds_VD for feature in features]),
        deepstack_VD=tuple(torch.cat(layer) for layer in layers),
    )


class FeatureCache:
    """Features by image key; the least recently used leave when the bound is reached.

    Right only while the vision tower does not change, so that rollout, log-probs and update may share it.
    """

    def __init__(self, max_bytes: float) -> None:
        self._max_bytes = max_bytes
        self._features: OrderedDict[str, ImageFeatures] = OrderedDict()
        self._bytes = 0
        self.encoded_images = 0

    def get(self, images: Sequence[PromptImage], encode: Encode) -> list[ImageFeatures]:
        """Features of the images, encoding those that are not known yet, each once."""
        missing = {image.key: image for image in images if image.key not in self._features}
        found = {image.key: self._features[image.key] for image in images if image.key not in missing}
        if missing:
            self.encoded_images += len(missing)
            found |= dict(zip(missing, encode(list(missing.values())), strict=True))
        for key, features in found.items():
            self._keep(key, features)
        return [found[image.key] for image in images]

    def _keep(self, key: str, features: ImageFeatures) -> None:
        if key not in self._features:
            self._bytes += features.num_bytes
        self._features[key] = features
        self._features.move_to_end(key)
        while self._bytes > self._max_bytes and self._features:
            _, oldest = self._features.popitem(last=False)
            self._bytes -= oldest.num_bytes
