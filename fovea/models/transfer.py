"""Copies from the host to the device, without making the host wait."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device; a copy to a GPU is queued after the work that is already queued there."""
    if device.type != "cuda":
        return host.to(device)
    # pinned first: the host would wait until the GPU copies from pageable memory
    return host.pin_memory().to(device, non_blocking=True)


def copy_pinned(host: Tensor, target: Tensor) -> None:
    """Copy host memory, which is pinned if the target is on a GPU, into a tensor, perhaps of another dtype.

    A copy to a GPU is queued: the host must not change the memory before it waits for later work on that stream.
    """
    assert host.is_pinned() or not target.is_cuda, "the host would wait for a copy of pageable memory"
    # a copy that is not queued would be converted on the host, into pageable memory
    target.copy_(host, non_blocking=True)
