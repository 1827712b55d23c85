"""The GPU memory of the pool of pages: its size where none is set, and whether it stays during updates (decision 051).

A pool that stays keeps its address, and with it the captured graphs; so do the engine's own copies of trained weights,
whose addresses are in the graphs too, so that both stay or neither. What an update needs is measured: when the engine
wakes, the driver's free memory is what the update had no use for even at its peak, since torch's allocator holds on to
what it has taken. Where an update that runs out of memory can free the pool and go on, one of a set size stays from the
first update on.
"""

from __future__ import annotations

import logging

import torch

from fovea.config.backends import DEFAULT_BATCH_TOKENS

GIB = 2**30
LOG = logging.getLogger(__name__)

POOL_FRAC = 0.8
"""Share of the free memory that a pool takes by default; the rest is for prefill, sampling and kept turns."""
SPARE_FRAC = 0.1
"""Share of the GPU that an update leaves free beside a pool that stays, since the next one may take more."""
MEASURED_UPDATES = 2
"""Updates that are measured before a pool stays, where none may fail: one may have had no signal, and so no passes."""
KEPT_PART = 8
"""A pool of the default size leaves kept turns an eighth of its tokens."""


def device_memory(device: torch.device | None) -> tuple[int, int] | None:
    """Free and total bytes of a GPU, by its driver; None for a CPU, or no device."""
    return None if device is None or device.type != "cuda" else torch.cuda.mem_get_info(device)


def default_bytes(free: int, beside_update: int = 0) -> int:
    """Size of a pool where none is set: all that may stay `beside_update`, if half of what may be freed or more."""
    most = int(POOL_FRAC * free)
    return most if 2 * beside_update < most else min(most, beside_update)


class PoolMemory:
    """Sizes the pool of one engine, and decides whether it stays."""

    def __init__(
        self,
        device: torch.device | None,
        max_batch_tokens: int | None,
        copied_bytes: int = 0,
        *,
        can_give_way: bool = False,
    ) -> None:
        """`device` None: the engine has no pool; `max_batch_tokens` None: by free memory on a GPU.

        `copied_bytes` is the size of the weights that stay with the pool, and are freed with it. `can_give_way`: an
        update that runs out of memory frees the pool and goes on.
        """
        # a pool of the default size leaves little, and how much an update takes is not known before
        self._min_updates = 0 if can_give_way and max_batch_tokens is not None else MEASURED_UPDATES
        self._device, self._max_batch_tokens, self._copied_bytes = device, max_batch_tokens, copied_bytes
        self.tokens = self.kept_tokens = 0
        """Tokens of the KV cache, and most tokens of the turns that are kept beside it; 0 before `size`."""
        self._pool_bytes = self._beside_update = self._num_updates = 0
        """Size of the pool, how large it may be to stay as the largest update left memory, and updates measured."""
        self._told: bool | None = None

    def size(self, token_bytes: int) -> None:
        """Choose the size of the pool that is made now."""
        # what the allocator holds without use is free memory for the pool
        torch.cuda.empty_cache()
        memory = device_memory(self._device)
        if self._max_batch_tokens is not None or memory is None:
            self.tokens = self.kept_tokens = self._max_batch_tokens or DEFAULT_BATCH_TOKENS
        else:
            self.tokens = default_bytes(memory[0], self._beside_update) // token_bytes
            self.kept_tokens = self.tokens // KEPT_PART
        self._pool_bytes = self.tokens * token_bytes  # what `stays` compares with the room beside an update
        if memory is not None:
            self._tell()

    def measure_update(self, *, stayed: bool) -> None:
        """Note what memory an update has left; `stayed`: beside the pool.

        An update that has freed a pool which was to stay had no memory for any beside it.
        """
        memory = device_memory(self._device)
        if memory is not None:
            free, total = memory
            held = (self._pool_bytes + self._copied_bytes) * stayed
            # less where it stayed, so that the memory of its graphs does not change the decision back and forth
            spare = int(SPARE_FRAC * total) // (2 if stayed else 1)
            was_freed = self.stays and not stayed
            beside = 0 if was_freed else free - spare + held - self._copied_bytes
            # an update without signal takes next to nothing, and the one after it what it always did
            self._beside_update = min(beside, self._beside_update) if self._num_updates else beside
            self._num_updates += 1

    @property
    def stays(self) -> bool:
        """True if the pool stays during the next update."""
        if self._num_updates < self._min_updates or not self._pool_bytes:
            return False
        return not self._num_updates or self._pool_bytes <= self._beside_update

    def _tell(self) -> None:
        if self._told != self.stays:
            what = "stays during updates, with the CUDA graphs" if self.stays else "is freed for the update"
            LOG.warning("KV cache of %d tokens (%.1f GiB), which %s", self.tokens, self._pool_bytes / GIB, what)
        self._told = self.stays
