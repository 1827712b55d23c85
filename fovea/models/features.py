"""A bounded memory of what the vision tower made of images, while the tower is frozen."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from fovea.models.image_features import ImageFeatures
from fovea.types import PromptImage

Encode = Callable[[Sequence[PromptImage]], Sequence[ImageFeatures]]


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
