"""The memory that the embedded engine takes besides the policy's weights: what it keeps, and when it frees it.

* The KV cache, and steppers with their captured graphs: freed for an update unless they fit beside it (`PoolMemory`),
  and when weights have other addresses, which graphs hold.
* Copied weights: freed with the KV cache while the engine sleeps.
* Decode copies of weights: freed as soon as no request runs, and with new weights.
* Kept turns: freed for every update, and with new weights.
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
    """Sizes the pool of one engine, and decides whether it stays.

    A pool that stays keeps its address, and with it the captured graphs; so do the engine's own copies of trained
    weights, whose addresses are in the graphs too, so that both stay or neither. What an update needs is measured:
    when the engine wakes, the driver's free memory is what the update had no use for even at its peak, since torch's
    allocator holds on to what it has taken. Where an update that runs out of memory can free the pool and go on, one
    of a set size stays from the first update on (decision 051).
    """

    def __init__(
        self,
        device: torch.device | None,
        max_batch_tokens: int | None,
        copied_bytes: int = 0,
        *,
        can_free_memory: bool = False,
    ) -> None:
        """`device` None: the engine has no pool; `max_batch_tokens` None: by free memory on a GPU.

        `copied_bytes` is the size of the weights that stay with the pool, and are freed with it. `can_free_memory`: an
        update that runs out of memory frees the pool and goes on.
        """
        # a pool of the default size leaves little, and how much an update takes is not known before
        self._min_updates = 0 if can_free_memory and max_batch_tokens is not None else MEASURED_UPDATES
        self._device, self._max_batch_tokens, self._copied_bytes = device, max_batch_tokens, copied_bytes
        self.tokens = self.kept_tokens = 0
        """Tokens of the KV cache, and most tokens of the turns that are kept beside it; 0 before `size`."""
        self._pool_bytes = self._beside_update = self._num_updates = 0
        """Size of the pool, how large it may be to stay as the largest update left memory, and updates measured."""
        self._reported: bool | None = None

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
        if self._reported != self.stays:
            what = "stays during updates, with the CUDA graphs" if self.stays else "is freed for the update"
            LOG.warning("KV cache of %d tokens (%.1f GiB), which %s", self.tokens, self._pool_bytes / GIB, what)
        self._reported = self.stays


class EngineMemory:
    """Makes and keeps the memory of one engine, and frees it; every method that frees some is named `free`."""

    def __init__(
        self, tuning: Tuning, shape: DecoderShape, pool: PoolMemory, copied_weights: Collection[Tensor] = ()
    ) -> None:
        """`copied_weights` are copies of the policy's weights, which every weight sync brings."""
        self._tuning, self._shape, self._pool, self._copied_weights = tuning, shape, pool, copied_weights
        self.cache: Cache | None = None
        self.steppers: dict[Make, Forward] = {}
        """Steppers by the kind of their linear layers; all but `PlainLinears` have decode copies of the weights."""
        self.turns: LRUCache[str, KeptKeys] = LRUCache(0)
        """KV cache of turns that another turn may continue, by completion id; its size is in tokens."""
        self._state_tokens = 0

    @property
    def tokens(self) -> int:
        """Tokens of the KV cache; 0 before it is made."""
        return self._pool.tokens

    @property
    def has_copied_weights(self) -> bool:
        """False from the time when the copied weights are freed until they are sent."""
        return all(weight.untyped_storage().nbytes() for weight in self._copied_weights)

    def ready_cache(self, like: Tensor) -> Cache:
        """The KV cache, with dtype and device of `like`; made here if there is none."""
        if self.cache is None:
            self._pool.size(self._shape.token_bytes(like.element_size()))
            self._state_tokens = self._shape.state_tokens(like.element_size())
            self.cache = make_cache(self._tuning, self._shape, like, num_tokens=self._pool.tokens)
            self._free_turns()
        return self.cache

    def keep_turns(self, batch: DecodeBatch, cache: Cache, finished: Sequence[int]) -> None:
        """Copy the KV cache of finished rows that another turn may continue, before compaction overwrites them.

        The least recently used turns are evicted beyond the token budget.
        """
        kept = [index for index in finished if batch.rows[index].request.request.keep]
        room = self._pool.kept_tokens
        for index, tokens in zip(kept, batch.num_stored(kept) if kept else [], strict=True):
            row = batch.rows[index]
            prompt = row.request.prompt
            num_tokens = prompt.num_tokens + tokens
            room -= num_tokens + self._state_tokens
            if room < 0:  # the next turn of the others is prefilled from its beginning
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
        """Note what memory the update that ends now has left."""
        self._pool.measure_update(stayed=self.cache is not None)

    def free_for_update(self) -> None:
        """Free what an update may need: all of it, or what does not stay beside the update."""
        if not self._pool.stays:
            self.free_all(copied_weights=True)
        self._free_turns()
        self._free_decode_copies()
        # to the driver, whose free memory tells how much an update takes
        torch.cuda.empty_cache()

    def free_all(self, *, copied_weights: bool = False) -> None:
        """Free everything but the weights; `copied_weights`: these too."""
        self.cache, self.steppers = None, {}
        self._free_turns()
        for weight in self._copied_weights if copied_weights else ():
            # all tensors that share the storage stay valid, and a weight sync fills it again
            weight.untyped_storage().resize_(0)

    def free_stale(self, *, moved: bool) -> None:
        """Free what was made with the weights before new ones; `moved`: those have other addresses."""
        self._free_turns()
        self._free_decode_copies()
        if moved:
            self.free_all()
        elif not isinstance(self.steppers.get(PlainLinears), GraphStepper):
            # captured graphs survive an update in place: they read the same addresses; a plain stepper may hold tensors
            # of the older weights
            self.steppers = {}

    def free_idle(self) -> None:
        """Free what only running requests need."""
        if self.cache is not None:
            self.cache.clear()
        self._free_decode_copies()

    def _free_decode_copies(self) -> None:
        """Free the decode copies: oneDNN and 8-bit weights."""
        self.steppers = {make: stepper for make, stepper in self.steppers.items() if make is PlainLinears}

    def _free_turns(self) -> None:
        self.turns = LRUCache(self._pool.kept_tokens)
