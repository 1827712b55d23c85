"""Copies from the host to the device of a pass, for which the host does not wait."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A host tensor on a device; the copy to a GPU is queued behind the work that is queued there already."""
    if device.type != "cuda":
        return host.to(device)
    # pageable memory is copied only when the GPU has come to the copy, and the host waits for that
    return host.pin_memory().to(device, non_blocking=True)
