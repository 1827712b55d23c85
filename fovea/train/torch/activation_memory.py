"""How much memory a forward pass keeps for its backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

GIB = 2**30


class ActivationMeter:
    """What autograd saves of the largest pass so far. A pass that is no larger runs as if there were no meter.

    Counted are the bytes of distinct storages, each in full, since a view keeps all of it; parameters are there anyway.
    What lives and dies within the forward pass, or is made in the backward pass, is not in it: with gradient
    checkpointing that is most, and the inputs of the layers remain.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._largest = 0
        self.num_bytes = 0

    @property
    def gib(self) -> float:
        return self.num_bytes / GIB

    @contextmanager
    def __call__(self, size: int) -> Iterator[None]:
        """Around a forward pass of this size, in whatever unit sizes are compared."""
        if size <= self._largest:
            yield
            return
        saved: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(count, _same):
            yield
        for parameter in self._module.parameters():
            saved.pop(parameter.untyped_storage().data_ptr(), None)
        self._largest = size
        # a longer row may keep less: one whose forward pass was looked up
        self.num_bytes = max(self.num_bytes, sum(saved.values()))


def _same(tensor: Tensor) -> Tensor:
    return tensor
