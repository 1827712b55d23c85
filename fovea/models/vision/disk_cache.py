"""Disk cache of image features that were evicted from memory; files restore them bit for bit."""

from __future__ import annotations

import hashlib
import shutil
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fovea.errors import ConfigError
from fovea.utils.lru_cache import LRUCache


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
