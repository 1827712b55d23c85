"""Micro-batches of one rank, of a size that fits the memory, and their results in the order of the batch.

The largest size is halved when an allocation fails. Before that, memory is freed that the engine in this process keeps
only for its next rollout.

Axes: `A` actions of a micro-batch, `T` tokens of a completion.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.config.sections import Train
from fovea.errors import MicrobatchMemoryError, is_out_of_memory, memory_for
from fovea.models.flops import training_passes
from fovea.models.policy_network import PolicyNetwork
from fovea.models.sampling_distribution import check_can_be_sampled
from fovea.models.trainable import lora_layers
from fovea.train.packing import MicroBatch, micro_batches
from fovea.train.ranks import Ranks
from fovea.train.row_assignment import Cost, RowAssignment, tokens_beside_engine, unsplittable_tokens
from fovea.types import Metrics, SampleGroup
from fovea.utils.host_waits import awaited
from fovea.utils.malloc import return_freed_memory
from fovea_gym.errors import FoveaError, OutOfMemoryError

LOG = logging.getLogger(__name__)
Result = TypeVar("Result")


class MicrobatchLimit:
    """The largest packed micro-batch in effect, in tokens: the setting, halved each time memory ran out."""

    # a sample carries its weight in the loss of the whole step (decision 008): any split has the same gradient

    def __init__(self, train: Train, ranks: Ranks) -> None:
        self.max_tokens = train.max_tokens_per_microbatch
        self.groups_per_row = train.groups_per_microbatch
        """Groups per micro-batch with train.enable_dynamic_batch_size=false."""
        self.free_memory: Callable[[], bool] = lambda: False
        """Frees what the engine in this process keeps for its next rollout; returns False if nothing was freed."""
        self._train = train
        self._ranks = ranks
        self._halvings = 0
        self._ran_out = False
        """True once memory has run out in this run: the engine's memory is then freed before all passes."""

    def fit(self, passes: Callable[[], Result], groups: Sequence[SampleGroup], cost: Cost) -> Result:
        """Run passes over micro-batches of these groups; whenever memory runs out, halve the limit and start again.

        OutOfMemoryError if no smaller limit can help. MicrobatchMemoryError with several ranks: one of them cannot
        start again while the others wait in collectives.
        """
        while True:
            try:
                return self.with_all_memory(passes)
            except (MemoryError, RuntimeError) as error:
                if isinstance(error, FoveaError) or not is_out_of_memory(error):
                    raise
                self._halve(groups, cost, error)
            _free_unreachable()

    def with_all_memory(self, passes: Callable[[], Result]) -> Result:
        """Run passes; if memory runs out, free the engine's memory for the rest of the run, and start again.

        MicrobatchMemoryError with several ranks, as in `fit`, but with the limit unchanged.
        """
        if self._ran_out:
            self.free_memory()
        try:
            return passes()
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, FoveaError) or not is_out_of_memory(error) or not self.free_memory():
                raise
            self._note_freed(error)
        _free_unreachable()
        return passes()

    def beside_engine(self, passes: Callable[[], Result], groups: Sequence[SampleGroup]) -> Result:
        """Run passes without gradients while the engine is awake, over one group at a time.

        OutOfMemoryError if memory runs out even so. The limit stays, since an update has more memory: the engine sleeps
        then.
        """
        fix = "lower the memory of the engine (rollout.engine) or model.max_pixels"

        def one_group_at_a_time() -> Result:
            with self._one_group_at_a_time(groups):
                return passes()

        # outside of the block with the lower limit: an error reports the limit of the run for the next attempt
        with memory_for("scoring while the engine is awake", fix):
            return self.with_all_memory(one_group_at_a_time)

    def lower(self, max_tokens: int) -> None:
        """Start with the limit that an earlier process of the run chose when it ran out of memory."""
        self.max_tokens = min(self.max_tokens, max_tokens)
        self._ran_out = True

    def metrics(self) -> Metrics:
        """The limit in effect, and how often it was halved since the last call."""
        halvings, self._halvings = self._halvings, 0
        return {"microbatch/max_tokens": float(self.max_tokens), "microbatch/out_of_memory": float(halvings)}

    @contextmanager
    def _one_group_at_a_time(self, groups: Sequence[SampleGroup]) -> Iterator[None]:
        before = self.max_tokens, self.groups_per_row
        self.max_tokens, self.groups_per_row = tokens_beside_engine(groups, self.max_tokens), 1
        try:
            yield
        finally:
            self.max_tokens, self.groups_per_row = before

    def _note_freed(self, error: BaseException) -> None:
        """Warn once that the engine's memory is freed from now on; with several ranks raise MicrobatchMemoryError."""
        freed = "the KV cache that the engine kept for its next rollout"
        fix = "lower rollout.engine.max_batch_tokens to keep it and its CUDA graphs"
        if self._ranks.size > 1:
            raise MicrobatchMemoryError(
                f"memory ran out on rank {self._ranks.rank} next to {freed}, and the other ranks wait for this one; "
                f"resume=auto frees it before every update (max_restarts resumes automatically); {fix}",
                self.max_tokens,
            ) from error
        if not self._ran_out:
            LOG.warning("memory ran out next to %s, which is freed before every update from now on; %s", freed, fix)
        self._ran_out = True

    def _halve(self, groups: Sequence[SampleGroup], cost: Cost, error: BaseException) -> None:
        train, ranks, before = self._train, self._ranks, self.max_tokens
        if not train.enable_dynamic_batch_size:
            raise OutOfMemoryError(
                f"memory ran out in a micro-batch of train.groups_per_microbatch={train.groups_per_microbatch} groups; "
                "lower it, or set train.enable_dynamic_batch_size=true, which splits groups and halves "
                "train.max_tokens_per_microbatch when needed"
            ) from error
        longest = unsplittable_tokens(groups)
        # a limit above the total would give the same single row again
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
                f"this one; resume=auto continues with at most {smaller} (max_restarts resumes automatically)",
                smaller,
            ) from error
        self.max_tokens = smaller
        self._halvings += 1


def _free_unreachable() -> None:
    """Free the tensors of passes that failed; called after the exception handler, whose traceback holds them."""
    gc.collect()
    return_freed_memory()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class MicroBatcher:
    """Packs samples into micro-batches for one rank."""

    def __init__(
        self, vlm: PolicyNetwork, train: Train, ranks: Ranks, limit: MicrobatchLimit, *, shards_tower: bool
    ) -> None:
        """`vlm` gives the family, banned ids, device and trained parts; it is not run."""
        self.assignment = RowAssignment(
            train=train,
            cost=cost_of(vlm),
            num_ranks=ranks.size,
            image_token_id=vlm.family.image_token_id,
            shards_tower=shards_tower,
        )
        self._vlm = vlm
        self._train = train
        self._ranks = ranks
        self._limit = limit

    def micro_batches(self, groups: Sequence[SampleGroup], only: SampleGroup | None = None) -> list[MicroBatch]:
        """Micro-batches of this rank's share of the groups; all ranks have the same number of them.

        With `only`, they hold only that group, each part of it on the rank that has its pixels. TrainError if an action
        is a banned token, which samples from other engines may contain.
        """
        if not groups:
            return []
        for group in groups:
            for sample in group.samples:
                actions = sample.token_ids_T[sample.mask_T]
                check_can_be_sampled(actions, self._vlm.banned_ids, f"a sample of {group.task_id}")
        rows_of_ranks = self.assignment.rows_of_ranks(
            groups, self._microbatch_tokens(groups), only, groups_per_row=self._limit.groups_per_row
        )
        mine, like = rows_of_ranks[self._ranks.rank], groups[0].samples[0]
        return micro_batches(self._vlm.family, mine, like, self._vlm.device)

    def balance(self, minibatches: Sequence[Sequence[SampleGroup]]) -> Metrics:
        """Balance of the work (`RowAssignment.balance`), averaged over the minibatches."""
        found = [self.assignment.balance(groups, self._microbatch_tokens(groups)) for groups in minibatches]
        return {key: float(np.mean([each[key] for each in found])) for key in found[0]}

    def _microbatch_tokens(self, groups: Sequence[SampleGroup]) -> int:
        return self.assignment.tokens_for(groups, self._limit.max_tokens)


def cost_of(vlm: PolicyNetwork) -> Cost:
    """Cost model of a training pass of this model, with features of a frozen vision tower and projector cached."""
    # a trained projector after a frozen tower needs only forward passes of the tower
    passes = training_passes(
        lora=bool(lora_layers(vlm)), trains_vision=vlm.trains_tower, features_cached=not vlm.trains_vision
    )
    return Cost(work=vlm.family.work, passes=passes)


def in_batch_order(
    scored: Iterable[tuple[MicroBatch, Tensor]], groups: Sequence[SampleGroup], ranks: Ranks
) -> list[NDArray[np.float32]]:
    """Scatter the actions' values [A] of all ranks into one array [T] per sample, in batch order, 0 elsewhere."""
    samples = [sample for group in groups for sample in group.samples]
    lengths = [len(sample.token_ids_T) for sample in samples]
    ends = list(accumulate(lengths))
    values = np.zeros(sum(lengths), dtype=np.float32)
    found = list(scored)
    numbers = [number for micro, _ in found for number in micro.sample_numbers]
    # in one copy, since the host waits for the GPU at each copy
    joined = awaited(torch.cat([values_A for _, values_A in found])).cpu() if found else torch.zeros(0)
    parts = joined.split([length for micro, _ in found for length in micro.lengths])
    for number, part in zip(numbers, parts, strict=True):
        values[ends[number] - lengths[number] : ends[number]][samples[number].mask_T] = part.numpy()
    # one array for the whole batch, so that one all-reduce is enough
    values = ranks.merge_disjoint(values)
    return [values[end - length : end] for end, length in zip(ends, lengths, strict=True)]
