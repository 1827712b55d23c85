"""Checksums of tensors, computed on their device; one copy to the host reads any number of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import islice
from zlib import crc32

import torch
from torch import Tensor

from fovea.utils.host_waits import awaited

WORD_BYTES = 8
ROW = 1 << 16
"""Words per row of multipliers: half a megabyte, which fits into a CPU's cache."""
ROWS_AT_ONCE = 1 << 6
PLACE_MULTIPLIER = 0x9E3779B97F4A7C1  # odd, and without a pattern in its bits


@torch.no_grad()
def bit_hash(tensor: Tensor) -> Tensor:
    """A hash of the bits of a tensor and their positions, computed in parts: an int64 on the tensor's device.

    The sum of 64-bit words, each times an odd multiplier of its position, modulo 2^64: a change of one word always
    changes the hash, and changes of many (all signs flipped, rows swapped) cancel only by chance.
    """
    flat = tensor.detach().contiguous().flatten()
    if flat.storage_offset() * flat.element_size() % WORD_BYTES:
        flat = flat.clone()  # words must begin at a multiple of their size
    octets = flat.view(torch.uint8)
    num_words = len(octets) // WORD_BYTES
    words, rest = octets[: num_words * WORD_BYTES].view(torch.int64), octets[num_words * WORD_BYTES :].long()
    num_rows = num_words // ROW
    multipliers = _odd_multipliers(tensor.device)
    total = (words[num_rows * ROW :] * multipliers[: num_words % ROW]).sum()
    for start in range(0, num_rows, ROWS_AT_ONCE):
        rows = words[start * ROW : min(start + ROWS_AT_ONCE, num_rows) * ROW].view(-1, ROW)
        total = total * PLACE_MULTIPLIER + ((rows * multipliers).sum(1) * multipliers[1 : 1 + len(rows)]).sum()
    # each remaining byte counts as a separate word, after all others
    return total * PLACE_MULTIPLIER + (rest * multipliers[: len(rest)]).sum()


def value_hash(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The hash of a tensor's values in this type, the same for 0 and -0."""
    return bit_hash(tensor.to(dtype) + 0)


def read_hashes(*groups: Sequence[Tensor]) -> list[list[int]]:
    """Read groups of hashes as Python integers, with one copy per device, for which the host waits."""
    hashes = [each for group in groups for each in group]
    found: dict[int, int] = {}
    for device in dict.fromkeys(each.device for each in hashes):
        places = [place for place, each in enumerate(hashes) if each.device == device]
        found |= zip(places, awaited(torch.stack([hashes[place] for place in places])).tolist(), strict=True)
    numbers = iter([found[place] for place in range(len(hashes))])
    return [list(islice(numbers, len(group))) for group in groups]


@cache
def _odd_multipliers(device: torch.device) -> Tensor:
    places = torch.arange(ROW, device=device)
    return (places * PLACE_MULTIPLIER) ^ (places >> 7) | 1


def combined(hashes: Iterable[int]) -> int:
    """Combine hashes, in order, into one 32-bit number, small enough for a metric."""
    total = 0
    for each in hashes:
        total = crc32(each.to_bytes(8, "little", signed=True), total)
    return total
