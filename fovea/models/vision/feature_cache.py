"""Cache of image features of a frozen vision tower."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fovea.models.vision.disk_cache import SpillFolder
from fovea.models.vision.features import ImageFeatures
from fovea.types import PromptImage
from fovea.utils.lru_cache import LRUCache

Encode = Callable[[Sequence[PromptImage]], Sequence[ImageFeatures]]


class FeatureCache:
    """LRU cache of features by image key, bounded in bytes; evicted features are written to `spill`, if given.

    Shared by rollout, log-probs, update and reference. Valid only while the vision tower is frozen.
    """

    def __init__(self, max_bytes: float, spill: SpillFolder | None = None) -> None:
        self._spill = spill
        self._features: LRUCache[str, ImageFeatures] = LRUCache(max_bytes, on_evict=self._evicted)
        self._device = torch.device("cpu")
        self.memory_hits = 0
        self.file_hits = 0
        self.encoded_images = 0

    def __deepcopy__(self, _memo: object) -> FeatureCache:
        """Return this cache itself."""
        # a copied model has the same frozen tower, and one cache for both halves the memory
        return self

    def get(self, images: Sequence[PromptImage], encode: Encode) -> list[ImageFeatures]:
        """Features of each image; those that are not cached are encoded, equal images once."""
        distinct = {image.key: image for image in images}
        found = {key: features for key in distinct if (features := self._known(key)) is not None}
        missing = {key: image for key, image in distinct.items() if key not in found}
        if missing:
            self.encoded_images += len(missing)
            found |= dict(zip(missing, encode(list(missing.values())), strict=True))
        # cached again only now: an insertion may evict features that this call still needs
        for key in distinct:
            self._keep(key, found[key])
        return [found[image.key] for image in images]

    def _known(self, key: str) -> ImageFeatures | None:
        cached = self._features.get(key)
        if cached is not None:
            self.memory_hits += 1
            return cached
        tensors = self._spill.read(key, self._device) if self._spill else None
        if tensors is None:
            return None
        self.file_hits += 1
        embeds_VD, *deepstack_VD = tensors
        return ImageFeatures(embeds_VD=embeds_VD, deepstack_VD=tuple(deepstack_VD))

    def _keep(self, key: str, features: ImageFeatures) -> None:
        self._device = features.embeds_VD.device
        self._features.put(key, features, features.num_bytes)

    def _evicted(self, key: str, features: ImageFeatures) -> None:
        if self._spill:
            self._spill.write(key, features.tensors)
