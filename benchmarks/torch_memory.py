"""Memory that torch holds on the CPU, by phase of a step: every allocation and release, as its profiler reports them.

Resident memory would add what the allocator keeps of freed blocks, Python's objects and numpy's arrays.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

MEMORY_EVENT = "[memory]"


class AllocationTrace:
    """Allocations of this thread between `start` and `stop`.

    The profiler sees no release of what was allocated before, or by another thread. Of the former, gradients are left
    out, which an update frees first of all; the latter must have ended.
    """

    def __init__(self) -> None:
        self.before = 0
        """Bytes of the tensors that were there at the start."""
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def start(self) -> None:
        gc.collect()
        self.before = live_bytes()
        self._profiler.start()

    def stop(self) -> None:
        self._profiler.stop()

    def peaks(self, phases: Sequence[str]) -> dict[str, list[int]]:
        """Most bytes held in each entry of each phase, in the order of its entries.

        A phase is a range of `torch.profiler.record_function` (`fovea.metrics.log.Phases`).
        """
        results: Any = self._profiler.profiler
        events: list[Any] = list(results.kineto_results.events())
        memory = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == MEMORY_EVENT)
        sums = accumulate((num_bytes for _, num_bytes in memory), initial=self.before)
        held = [(time, total) for (time, _), total in zip(memory, list(sums)[1:], strict=True)]
        entries = sorted((event.start_ns(), event.end_ns(), event.name()) for event in events if event.name() in phases)
        found: dict[str, list[int]] = {phase: [] for phase in phases}
        for start, end, phase in entries:
            found[phase].append(max((total for time, total in held if start <= time <= end), default=0))
        return found


def live_bytes() -> int:
    """Bytes of all tensors of this process but gradients, each storage once."""
    sizes = _sizes(tensors := _tensors())
    for gradient in _gradients(tensors):
        sizes.pop(gradient.untyped_storage().data_ptr(), None)
    return sum(sizes.values())


def live_bytes_with_gradients() -> int:
    """Bytes of all tensors of this process, each storage once."""
    tensors = _tensors()
    return sum(_sizes([*tensors, *_gradients(tensors)]).values())


def _tensors() -> list[Tensor]:
    # type and not isinstance: proxies of other packages pretend to be tensors, and are loaded by the question
    found = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and each.device.type == "cpu"]
    # the memory of a DTensor is that of its local tensor, which is among them
    return [each for each in found if not isinstance(each, DTensor)]


def _gradients(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]


def _sizes(tensors: Sequence[Tensor]) -> dict[int, int]:
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
