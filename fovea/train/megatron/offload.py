"""Tensors of a GPU that lie in the host's memory while nothing uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Offloaded:
    """Keeps the contents of tensors in the host's memory, but for the blocks that use them.

    The tensors stay the same objects, and their memory on the GPU is free in between; so nothing that refers to them,
    as an optimizer does to its state, has to know.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """`tensors` lists them, each with a storage of its own; it is asked after each block, as they may be others."""
        self._list = tensors
        self._tensors: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._release()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Within the block the tensors can be read and written."""
        self._restore()
        try:
            yield
        finally:
            self._release()

    @torch.no_grad()
    def _release(self) -> None:
        self._tensors = list(self._list())
        if [x.shape for x in self._tensors] != [x.shape for x in self._copies]:
            # made once: pinning memory takes longer than a copy
            self._copies = [torch.empty_like(x, device="cpu", pin_memory=x.is_cuda) for x in self._tensors]
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            copy.copy_(tensor, non_blocking=True)
        self._wait()
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)

    @torch.no_grad()
    def _restore(self) -> None:
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            tensor.untyped_storage().resize_(copy.nbytes)
            tensor.copy_(copy, non_blocking=True)
        self._wait()

    def _wait(self) -> None:
        """Wait for the copies, whose source may be overwritten or freed next."""
        if any(tensor.is_cuda for tensor in self._tensors):
            torch.cuda.synchronize()
