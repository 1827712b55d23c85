"""Measures the host memory of the tensors that a block of code makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class HostBytes(TorchDispatchMode):
    """Measures the largest number of bytes of host memory that tensors made in the block hold at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[StorageWeakRef, int] = {}
        self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {x.untyped_storage()._cdata for x in args if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.device.type == "cpu" and out.untyped_storage()._cdata not in given:
            self._live[StorageWeakRef(out.untyped_storage())] = out.untyped_storage().nbytes()
        self._live = {storage: size for storage, size in self._live.items() if not storage.expired()}
        self.most = max(self.most, sum(self._live.values()))
        return out
