"""Cache of image features of a frozen vision tower."""

from __future__ import annotations

import hashlib
import shutil
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fovea.errors import ConfigError
from fovea.types import PromptImage
from fovea.utils.lru_cache import LRUCache


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


class SpillFolder:
    """LRU cache of tensors in one safetensors file per key, bounded in bytes.

    The folder belongs to the cache: it is emptied at the start and removed when the process ends. A missing or damaged
    file, or one that cannot be written, is a cache miss.
    """

    def __init__(self, folder: Path, max_bytes: float) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._files: LRUCache[str, Path] = LRUCache(max_bytes, on_evict=lambda _key, file: file.unlink(missing_ok=True))
        try:
            # features of an earlier run may belong to other weights
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(
                f"model.feature_spill_gib: {folder} cannot be made ({error.strerror}); set model.feature_spill_gib=0, "
                "or another run_dir"
            ) from error
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    def write(self, key: str, tensors: Sequence[Tensor]) -> None:
        """Write tensors to a file, unless the key is cached or they are larger than the bound."""
        size = sum(x.numel() * x.element_size() for x in tensors)
        if key in self._files or size > self._max_bytes:
            return
        file = self._file(key)
        self._files.put(key, file, size)  # before it is written, so that there is room for it
        try:
            save_file({str(n): x.detach().cpu().contiguous() for n, x in enumerate(tensors)}, file)
        except (OSError, SafetensorError):  # a full disk: the image is encoded again, and counted as such
            self._drop(key)

    def read(self, key: str, device: torch.device) -> list[Tensor] | None:
        """Cached tensors on a device; None if there is no readable file."""
        file = self._files.get(key)
        if file is None:
            return None
        try:
            named = load_file(file, device=str(device))
            tensors = [named[str(n)] for n in range(len(named))]
        except (OSError, SafetensorError, KeyError):
            self._drop(key)
            return None
        return tensors

    def _drop(self, key: str) -> None:
        self._files.discard(key)
        self._file(key).unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        """File of a key."""
        # a hash, so that no key makes a name that is too long or leaves the folder
        return self._folder / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.safetensors"


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
