"""A checksum of a tensor, computed on its own device."""

from __future__ import annotations

import torch
from torch import Tensor

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
HASHED_AT_ONCE = 1 << 24
PLACE_MULTIPLIER = 0x9E3779B97F4A7C1  # odd, and without a pattern in its bits


def bit_hash(tensor: Tensor) -> int:
    """A hash of the bits of a tensor and of their places, made where the tensor is, a part at a time.

    The sum of bits times a multiplier of their place, modulo 2^64: a change of one value always shows, and changes
    of many (all signs turned, rows swapped) cancel by chance only.
    """
    bits = tensor.detach().contiguous().flatten().view(BITS[tensor.element_size()])
    total = 0
    for start in range(0, len(bits), HASHED_AT_ONCE):
        part = bits[start : start + HASHED_AT_ONCE].long()
        places = torch.arange(start, start + len(part), device=part.device)
        total += int((part * ((places * PLACE_MULTIPLIER) ^ (places >> 7) | 1)).sum())
    return total
