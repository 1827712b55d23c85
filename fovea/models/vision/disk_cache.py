"""Features on disk: what a bounded memory of images lets go comes back from a file to the last bit."""

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
    """Tensors in one safetensors file per key; the least recently used are deleted at the bound.

    The folder is its own: emptied at the start, since features belong to the weights of one run, and removed when the
    process ends. A file that is gone, cut short or cannot be written is as if it had never been there.
    """

    def __init__(self, folder: Path, max_bytes: float) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._files: LRUCache[str, Path] = LRUCache(max_bytes, on_evict=lambda _key, file: file.unlink(missing_ok=True))
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(
                f"model.feature_spill_gib: {folder} cannot be made ({error.strerror}); set model.feature_spill_gib=0, "
                "or another run_dir"
            ) from error
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    def write(self, key: str, tensors: Sequence[Tensor]) -> None:
        """Keep the tensors, unless they are there already or larger than the bound."""
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
        """The tensors on a device; None where there is no sound file."""
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
        """Whatever the key holds, the name is short and stays inside the folder."""
        return self._folder / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.safetensors"
