"""Memory that torch holds on the CPU by phase of a step, from the allocations and frees that its profiler reports.

Resident memory would also count freed blocks that the allocator keeps, Python objects and numpy arrays.
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

    The profiler does not report frees of memory that was allocated before `start` or by another thread. Gradients that
    exist at `start` are not counted, since an update frees them first; other threads must have ended.
    """

    def __init__(self) -> None:
        self.before = 0
        """Bytes of the tensors that existed at `start`, without gradients."""
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def start(self) -> None:
        gc.collect()
        self.before = live_bytes()
        self._profiler.start()

    def stop(self) -> None:
        self._profiler.stop()

    def peaks(self, phases: Sequence[str]) -> dict[str, list[int]]:
        """The peak bytes held during each entry into each phase, in the order of the entries.

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
    """Bytes of all tensors of this process except gradients; each storage counts once."""
    sizes = _sizes(tensors := _tensors())
    for gradient in _gradients(tensors):
        sizes.pop(gradient.untyped_storage().data_ptr(), None)
    return sum(sizes.values())


def live_bytes_with_gradients() -> int:
    """Bytes of all tensors of this process; each storage counts once."""
    tensors = _tensors()
    return sum(_sizes([*tensors, *_gradients(tensors)]).values())


def _tensors() -> list[Tensor]:
    # type instead of isinstance, which would load proxies of other packages that pretend to be tensors
    found = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and each.device.type == "cpu"]
    # leave out DTensors: their memory belongs to local tensors, which are in the list
    return [each for each in found if not isinstance(each, DTensor)]


def _gradients(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]


def _sizes(tensors: Sequence[Tensor]) -> dict[int, int]:
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
