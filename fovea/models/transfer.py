"""Copies from the host to the device of a pass, without making the host wait."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device; a copy to a GPU is queued after the work that is already queued there."""
    if device.type != "cuda":
        return host.to(device)
    # pinned first: the host would wait until the GPU copies from pageable memory
    return host.pin_memory().to(device, non_blocking=True)
