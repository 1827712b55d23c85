"""Micro-batches that fit the memory: their largest size, which is halved when an allocation fails."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from fovea.config.run import Train
from fovea.errors import MicrobatchMemoryError, OutOfMemoryError, is_out_of_memory
from fovea.train.deal import unsplittable_tokens
from fovea.train.microbatching import Cost
from fovea.train.ranks import Ranks
from fovea.types import Metrics, SampleGroup
from fovea.utils.malloc import return_freed_memory

Result = TypeVar("Result")


class MicrobatchLimit:
    """The largest packed micro-batch in effect, in tokens: the setting, halved each time memory ran out."""

    # a sample carries its weight in the loss of the whole step (decision 008): any split has the same gradient

    def __init__(self, train: Train, ranks: Ranks) -> None:
        self.max_tokens = train.max_tokens_per_microbatch
        self._train = train
        self._ranks = ranks
        self._halvings = 0

    def fit(self, passes: Callable[[], Result], groups: Sequence[SampleGroup], cost: Cost) -> Result:
        """Run passes over micro-batches of these groups; as long as memory runs out, halve the limit and begin again.

        OutOfMemoryError where no smaller limit can help. Among several ranks none can begin again by itself, since the
        others wait in collectives: MicrobatchMemoryError.
        """
        while True:
            try:
                return passes()
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                self._halve(groups, cost, error)
            # behind the handler: the error's traceback held the tensors of the passes
            gc.collect()
            return_freed_memory()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def lower(self, max_tokens: int) -> None:
        """Begin with a limit with which an earlier process of the run ended."""
        self.max_tokens = min(self.max_tokens, max_tokens)

    def metrics(self) -> Metrics:
        """The limit in effect, and how often it was halved since the last call."""
        halvings, self._halvings = self._halvings, 0
        return {"microbatch/max_tokens": float(self.max_tokens), "microbatch/out_of_memory": float(halvings)}

    def _halve(self, groups: Sequence[SampleGroup], cost: Cost, error: BaseException) -> None:
        train, ranks, before = self._train, self._ranks, self.max_tokens
        if not train.enable_dynamic_batch_size:
            raise OutOfMemoryError(
                f"memory ran out in a micro-batch of train.groups_per_microbatch={train.groups_per_microbatch} groups; "
                "lower it, or set train.enable_dynamic_batch_size=true, which splits groups and halves "
                "train.max_tokens_per_microbatch by itself"
            ) from error
        longest = unsplittable_tokens(groups)
        # a limit above all that there is would give the same single row again
        largest = min(before, int(sum(map(cost.of, groups))))
        if largest <= longest:
            raise OutOfMemoryError(
                f"memory ran out in a micro-batch of one completion and its prompt, {longest} tokens; lower "
                "rollout.max_new_tokens or model.max_pixels, set train.gradient_checkpointing=full, or train fewer "
                "weights (model.lora)"
            ) from error
        smaller = max(largest // 2, longest)
        if ranks.size > 1:
            raise MicrobatchMemoryError(
                f"memory ran out on rank {ranks.rank} in a micro-batch of {before} tokens at most "
                f"(train.max_tokens_per_microbatch={train.max_tokens_per_microbatch}), and the other ranks wait for "
                f"this one; resume=auto goes on with {smaller} at most (max_restarts does so by itself)",
                smaller,
            ) from error
        self.max_tokens = smaller
        self._halvings += 1
