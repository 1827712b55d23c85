"""The embedded engine's memory besides the policy's weights: what it keeps, and when it frees it.

* KV cache, and steppers with their captured graphs: freed for an update unless there is room for both (`PoolMemory`),
  and when the addresses of the weights change, since graphs hold them.
* Copied weights: freed together with the KV cache while the engine sleeps.
* Decode copies of weights: freed as soon as no request runs, and when new weights arrive.
* Kept turns: freed for every update, and when new weights arrive.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from fovea.config.backends import DEFAULT_BATCH_TOKENS
from fovea.models.decoder import DecoderShape
from fovea.rollout.embedded.batch import DecodeBatch, Forward
from fovea.rollout.embedded.cache import Cache
from fovea.rollout.embedded.decode_step import GraphStepper
from fovea.rollout.embedded.linears import Make, PlainLinears
from fovea.rollout.embedded.requests import KeptKeys
from fovea.rollout.embedded.tuning import Tuning, make_cache
from fovea_gym.utils.lru_cache import LRUCache

GIB = 2**30
LOG = logging.getLogger(__name__)

POOL_FRAC = 0.8
"""Share of the free memory that a pool uses by default; the rest is for prefill, sampling and kept turns."""
SPARE_FRAC = 0.1
"""Share of the GPU that must stay free in an update if the pool stays, since the next update may need more memory."""
MEASURED_UPDATES = 2
"""Updates to measure before a pool stays, if no update may fail; a single one may have had no signal and so no pass."""
KEPT_PART = 8
"""With a pool of the default size, kept turns may hold the pool's tokens divided by this number."""


def device_memory(device: torch.device | None) -> tuple[int, int] | None:
    """Free and total bytes of a GPU according to its driver; None for a CPU, or without a device."""
    return None if device is None or device.type != "cuda" else torch.cuda.mem_get_info(device)


def default_bytes(free: int, beside_update: int = 0) -> int:
    """Default pool size: POOL_FRAC of the `free` memory, or less if the pool can then stay during updates.

    It is reduced to `beside_update`, the size that may stay, if that is at least half as much.
    """
    most = int(POOL_FRAC * free)
    return most if 2 * beside_update < most else min(most, beside_update)


class PoolMemory:
    """Chooses the size of an engine's KV cache pool, and decides whether the pool stays during updates.

    A pool that stays keeps its address, and thus the captured graphs. The graphs also hold the addresses of the
    engine's copies of trained weights, so pool and copies either both stay or are both freed. The memory of an update
    is measured when the engine wakes: torch's allocator keeps all memory that it has reserved, so the driver's free
    memory is then what the update did not need even at its peak. If an update that runs out of memory can free the pool
    and continue, a pool of a configured size stays from the first update on (decision 051).
    """

    def __init__(
        self,
        device: torch.device | None,
        max_batch_tokens: int | None,
        copied_bytes: int = 0,
        *,
        can_free_memory: bool = False,
    ) -> None:
        """Without `device`, the engine has no pool; without `max_batch_tokens`, its size follows a GPU's free memory.

        `copied_bytes` is the size of the copied weights, which stay or are freed with the pool. With `can_free_memory`,
        an update that runs out of memory frees the pool and continues.
        """
        # a pool of the default size leaves little memory, and the need of an update is not known in advance
        self._min_updates = 0 if can_free_memory and max_batch_tokens is not None else MEASURED_UPDATES
        self._device, self._max_batch_tokens, self._copied_bytes = device, max_batch_tokens, copied_bytes
        self.tokens = self.kept_tokens = 0
        """Number of tokens of the KV cache, and maximum number of tokens in kept turns; 0 before `size`."""
        self._pool_bytes = self._beside_update = self._num_updates = 0
        """Size of the pool, maximum size with which it may stay, and number of measured updates."""
        self._reported: bool | None = None

    def size(self, token_bytes: int) -> None:
        """Choose the size of the pool, just before it is allocated."""
        # memory that the allocator holds without using it is free for the pool
        torch.cuda.empty_cache()
        memory = device_memory(self._device)
        if self._max_batch_tokens is not None or memory is None:
            self.tokens = self.kept_tokens = self._max_batch_tokens or DEFAULT_BATCH_TOKENS
        else:
            self.tokens = default_bytes(memory[0], self._beside_update) // token_bytes
            self.kept_tokens = self.tokens // KEPT_PART
        self._pool_bytes = self.tokens * token_bytes  # `stays` compares it with the memory that updates leave
        if memory is not None and self._reported != self.stays:
            what = "stays during updates, with the CUDA graphs" if self.stays else "is freed for the update"
            LOG.warning("KV cache of %d tokens (%.1f GiB), which %s", self.tokens, self._pool_bytes / GIB, what)
            self._reported = self.stays

    def measure_update(self, *, stayed: bool) -> None:
        """Measure the memory that an update has left; `stayed` says whether the pool stayed during the update.

        If the update freed a pool that should have stayed, it left no memory for a pool.
        """
        memory = device_memory(self._device)
        if memory is not None:
            free, total = memory
            held = (self._pool_bytes + self._copied_bytes) * stayed
            # half as much if the pool stayed, so that the memory of its graphs does not flip the decision each time
            spare = int(SPARE_FRAC * total) // (2 if stayed else 1)
            was_freed = self.stays and not stayed
            beside = 0 if was_freed else free - spare + held - self._copied_bytes
            # the minimum, since an update without signal needs next to no memory, but the next one as much as usual
            self._beside_update = min(beside, self._beside_update) if self._num_updates else beside
            self._num_updates += 1

    @property
    def stays(self) -> bool:
        """True if the pool stays during the next update."""
        if self._num_updates < self._min_updates or not self._pool_bytes:
            return False
        return not self._num_updates or self._pool_bytes <= self._beside_update


class EngineMemory:
    """Allocates, keeps and frees the memory of one engine; the methods that free memory are named `free_...`."""

    def __init__(
        self, tuning: Tuning, shape: DecoderShape, pool: PoolMemory, copied_weights: Collection[Tensor] = ()
    ) -> None:
        """`copied_weights` are copies of the policy's weights that every weight sync sends."""
        self._tuning, self._shape, self._pool, self._copied_weights = tuning, shape, pool, copied_weights
        self.cache: Cache | None = None
        self.steppers: dict[Make, Forward] = {}
        """Steppers by their kind of linear layers; all except `PlainLinears` hold decode copies of the weights."""
        self.turns: LRUCache[str, KeptKeys] = LRUCache(0)
        """KV cache of turns that may be continued, by completion id; sizes are in tokens."""
        self._state_tokens = 0

    @property
    def tokens(self) -> int:
        """Number of tokens of the KV cache; 0 before it is allocated."""
        return self._pool.tokens

    @property
    def has_copied_weights(self) -> bool:
        """False after the copied weights were freed, until they are sent again."""
        return all(weight.untyped_storage().nbytes() for weight in self._copied_weights)

    def ready_cache(self, like: Tensor) -> Cache:
        """Return the KV cache, allocated with the dtype and device of `like` if there is none."""
        if self.cache is None:
            self._pool.size(self._shape.token_bytes(like.element_size()))
            self._state_tokens = self._shape.state_tokens(like.element_size())
            self.cache = make_cache(self._tuning, self._shape, like, num_tokens=self._pool.tokens)
            self._free_turns()
        return self.cache

    def keep_turns(self, batch: DecodeBatch, cache: Cache, finished: Sequence[int]) -> None:
        """Copy the KV cache of finished rows that may be continued, before compaction overwrites it.

        Beyond the token budget, the least recently used turns are evicted.
        """
        kept = [index for index in finished if batch.rows[index].request.request.keep]
        room = self._pool.kept_tokens
        for index, tokens in zip(kept, batch.num_stored(kept) if kept else [], strict=True):
            row = batch.rows[index]
            prompt = row.request.prompt
            num_tokens = prompt.num_tokens + tokens
            room -= num_tokens + self._state_tokens
            if room < 0:  # the next turns of the remaining rows are prefilled from the beginning
                break
            keys = KeptKeys(
                layers=cache.copy_row(index, tokens),
                num_tokens=num_tokens,
                cost_tokens=num_tokens + self._state_tokens,
                num_images=len(prompt.images),
                states=() if cache.states is None else cache.states.copy_row(index),
            )
            self.turns.put(row.completion_id, keys, keys.cost_tokens)

    def measure_update(self) -> None:
        """Measure the memory that the update ending now has left."""
        self._pool.measure_update(stayed=self.cache is not None)

    def free_for_update(self) -> None:
        """Free memory for an update: all of it, or only what does not stay during updates."""
        if not self._pool.stays:
            self.free_all(copied_weights=True)
        self._free_turns()
        self._free_decode_copies()
        # return it to the driver, whose free memory shows how much an update needs
        torch.cuda.empty_cache()

    def free_all(self, *, copied_weights: bool = False) -> None:
        """Free everything except weights; with `copied_weights`, also the copied ones."""
        self.cache, self.steppers = None, {}
        self._free_turns()
        for weight in self._copied_weights if copied_weights else ():
            # tensors that share the storage stay valid, and a weight sync refills it
            weight.untyped_storage().resize_(0)

    def free_stale(self, *, moved: bool) -> None:
        """Free memory that depends on the previous weights; `moved` says that the new ones have other addresses."""
        self._free_turns()
        self._free_decode_copies()
        if moved:
            self.free_all()
        elif not isinstance(self.steppers.get(PlainLinears), GraphStepper):
            # captured graphs stay valid after an update in place, since they read the same addresses; an eager stepper
            # may hold tensors of the previous weights
            self.steppers = {}

    def free_idle(self) -> None:
        """Free memory that only running requests need."""
        if self.cache is not None:
            self.cache.clear()
        self._free_decode_copies()

    def _free_decode_copies(self) -> None:
        """Free the decode copies of the weights, in oneDNN's layout or in 8 bits."""
        self.steppers = {make: stepper for make, stepper in self.steppers.items() if make is PlainLinears}

    def _free_turns(self) -> None:
        self.turns = LRUCache(self._pool.kept_tokens)
