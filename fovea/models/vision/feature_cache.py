"""Cache of image features of a frozen vision tower."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fovea.types import PromptImage
from fovea_gym.utils.lru_cache import LRUCache


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


Encode = Callable[[Sequence[PromptImage]], Sequence[ImageFeatures]]


class FeatureCache:
    """LRU cache of features by image key, bounded in bytes; valid only while the vision tower is frozen."""

    def __init__(self, max_bytes: float) -> None:
        self._features: LRUCache[str, ImageFeatures] = LRUCache(max_bytes)
        self.encoded_images = 0

    def __deepcopy__(self, _memo: object) -> FeatureCache:
        """Return this cache itself."""
        # a copied model has the same frozen tower, and sharing the cache halves the memory
        return self

    def get(self, images: Sequence[PromptImage], encode: Encode) -> list[ImageFeatures]:
        """Features of each image; images that are not cached are encoded, equal ones only once."""
        distinct = {image.key: image for image in images}
        found = {key: features for key in distinct if (features := self._features.get(key)) is not None}
        missing = {key: image for key, image in distinct.items() if key not in found}
        if missing:
            self.encoded_images += len(missing)
            found |= dict(zip(missing, encode(list(missing.values())), strict=True))
        # inserted only now, since an insertion may evict features that this call still needs
        for key in distinct:
            self._features.put(key, found[key], found[key].num_bytes)
        return [found[image.key] for image in images]
