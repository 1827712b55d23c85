"""Assignment of groups to ranks, in rows that keep ranks from waiting for each other.

Ranks with sharded weights enter every layer together: in a micro-batch all wait for the rank with the most vision work,
and then for the one with the most text. Rows of all ranks are therefore filled at once, with text and vision balanced
apart, and rows that are alike run side by side.

Axes: `R` bins (rows, or ranks), 2 = cost of text and of vision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias, TypeVar

import numpy as np

from fovea.config.algorithm import Algorithm
from fovea.config.sections import Train
from fovea.train.microbatching import Cost, GroupSlice, RowSlices, pack_by_cost, pack_by_count, slice_groups
from fovea.types import Batch, Metrics, Prompt, PromptImage, SampleGroup


def rows_by_cost(slices: Sequence[GroupSlice], cost: Cost, num_ranks: int, max_tokens: int) -> list[list[RowSlices]]:
    """Rows of each rank under a budget of cost, as few as that needs; a slice above it gets a row to itself."""
    if num_ranks == 1:
        return [pack_by_cost(slices, cost, max_tokens)]
    parts = [_parts(each, cost) for each in slices]
    rows_per_rank = max(1, math.ceil(sum(map(sum, parts)) / (num_ranks * max_tokens)))
    while True:
        bins = _deal(parts, num_ranks * rows_per_rank)
        if all(len(each) <= 1 or sum(sum(parts[index]) for index in each) <= max_tokens for each in bins):
            break
        rows_per_rank += 1
    filled = [sorted(each) for each in bins if each]
    filled.sort(key=lambda each: _sums([parts[index] for index in each])[::-1], reverse=True)
    rows = [[slices[index] for index in each] for each in filled]
    return [list(rows[rank::num_ranks]) for rank in range(num_ranks)]


def rows_by_count(
    slices: Sequence[GroupSlice], cost: Cost, num_ranks: int, groups_per_row: int
) -> list[list[RowSlices]]:
    """Rows of each rank with a fixed number of groups, in the order of the batch; ranks have about the same cost."""
    shares = _deal([_parts(each, cost) for each in slices], num_ranks)
    return [pack_by_count([slices[index] for index in sorted(share)], groups_per_row) for share in shares]


def align_ranks(rows_of_ranks: Sequence[Sequence[RowSlices]], dummy: GroupSlice) -> list[list[RowSlices]]:
    """Add dummy slices until all ranks have the same number of rows, each with an image if the dummy has one.

    `dummy` is a slice without samples. It adds nothing to the loss.
    """
    # FSDP2 all-gathers the weights of a module whenever a rank enters it: a rank that skipped a row, or the vision
    # tower in a row of text, would leave the others waiting
    longest = max(map(len, rows_of_ranks), default=0)
    filled = [[*rows, *[[dummy]] * (longest - len(rows))] for rows in rows_of_ranks]
    if not dummy.group.images:
        return filled
    return [[row if _has_image(row) else [*row, dummy] for row in rows] for rows in filled]


def slices_of(group: SampleGroup, rows_of_ranks: Sequence[Sequence[RowSlices]]) -> list[list[RowSlices]]:
    """The rows of each rank with the slices of one group only."""
    kept = [
        [[each for each in row if each.group.samples[0] in group.samples] for row in rows] for rows in rows_of_ranks
    ]
    return [[row for row in rows if row] for rows in kept]


def imbalance(rows_of_ranks: Sequence[Sequence[RowSlices]], cost: Cost) -> float:
    """Work of the slowest rank, in each micro-batch and apart for vision and text, over the mean of all ranks.

    1 if no rank ever waits for another. The ranks have as many rows each (`align_ranks`).
    """
    parts = [[_row_parts(row, cost) for row in rows] for rows in rows_of_ranks]
    together = list(zip(*parts, strict=True))
    slowest = sum(max(text for text, _ in of_ranks) + max(vision for _, vision in of_ranks) for of_ranks in together)
    total = sum(sum(part) for of_ranks in together for part in of_ranks)
    return slowest * len(parts) / total if total else 1.0


def unevenness(rows_of_ranks: Sequence[Sequence[RowSlices]], cost: Cost) -> float:
    """Cost of the dearest row over the mean of all rows of all ranks: 1 where all micro-batches are filled alike."""
    costs = [sum(_row_parts(row, cost)) for rows in rows_of_ranks for row in rows]
    return max(costs) * len(costs) / sum(costs) if sum(costs) else 1.0


Parts = tuple[float, float]
"""Cost of text and of vision."""


def _parts(each: GroupSlice, cost: Cost) -> Parts:
    vision = cost.vision(each.group)
    return cost.of(each.group) - vision, vision


def _row_parts(row: RowSlices, cost: Cost) -> Parts:
    return _sums([_parts(each, cost) for each in row])


def _sums(parts: Sequence[Parts]) -> Parts:
    return sum(text for text, _ in parts), sum(vision for _, vision in parts)


def _deal(parts: Sequence[Parts], num_bins: int) -> list[list[int]]:
    """Indices by bin: the dearest first, each into the bin where the largest text and vision costs rise least.

    With one kind of cost it is the longest-processing-time-first rule (Graham, SIAM J. Appl. Math. 17, 1969), whose
    largest bin costs at most 4/3 of the optimum.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads_2R = np.zeros((2, num_bins))
    for index in sorted(range(len(parts)), key=lambda index: -sum(parts[index])):
        after_2R = loads_2R + np.array(parts[index])[:, None]
        rise_R = np.maximum(after_2R, loads_2R.max(axis=1, keepdims=True)).sum(axis=0)
        # among equals the emptiest, and then the first: on every rank alike
        equals = np.flatnonzero(rise_R == rise_R.min())
        chosen = int(equals[after_2R[:, equals].sum(axis=0).argmin()])
        bins[chosen].append(index)
        loads_2R[:, chosen] = after_2R[:, chosen]
    return bins


def _has_image(row: RowSlices) -> bool:
    return any(each.group.images for each in row)


ImageKeys: TypeAlias = frozenset[str]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """How passes of one model over some groups are dealt to the ranks."""

    train: Train
    cost: Cost
    num_ranks: int
    image_token_id: int
    shards_tower: bool
    """All ranks must run the vision tower together, so that a row without an image gets that of a dummy."""

    def rows_of_ranks(
        self,
        groups: Sequence[SampleGroup],
        max_tokens: int,
        only: SampleGroup | None = None,
        *,
        groups_per_row: int | None = None,
    ) -> list[list[RowSlices]]:
        """Rows of each rank, as many for every one, of at most `max_tokens` where the train settings limit them.

        `groups_per_row` replaces `train.groups_per_microbatch`; no image changes its rank by it.
        With `only`, no more than that group's slices remain, each on the rank that has it among all groups.
        """
        if self.train.enable_dynamic_batch_size:
            rows = rows_by_cost(slice_groups(groups, max_tokens), self.cost, self.num_ranks, max_tokens)
        else:
            count = groups_per_row or self.train.groups_per_microbatch
            rows = rows_by_count(slice_groups(groups), self.cost, self.num_ranks, count)
        rows = rows if only is None else slices_of(only, rows)
        return align_ranks(rows, GroupSlice(group=SampleGroup(prompt=self._dummy(groups), samples=()), first_sample=0))

    def balance(self, groups: Sequence[SampleGroup], max_tokens: int) -> Metrics:
        """How evenly the work of passes over these groups is divided among ranks, and among all micro-batches."""
        rows = self.rows_of_ranks(groups, max_tokens)
        return {"balance/ranks": imbalance(rows, self.cost), "balance/microbatches": unevenness(rows, self.cost)}

    def tokens_for(self, groups: Sequence[SampleGroup], limit_tokens: int) -> int:
        """Largest micro-batch of these groups; a limit below the settings' gives way to their longest completion."""
        return max(limit_tokens, min(self.train.max_tokens_per_microbatch, unsplittable_tokens(groups)))

    def images_of_ranks(self, groups: Sequence[SampleGroup], limit_tokens: int) -> list[ImageKeys]:
        """Keys of the images in each rank's rows, that of the dummy among them."""
        rows_of_ranks = self.rows_of_ranks(groups, self.tokens_for(groups, limit_tokens))
        of_dummy = _keys(self._dummy(groups).images)
        return [
            of_dummy | _keys(image for row in rows for each in row for image in each.group.images)
            for rows in rows_of_ranks
        ]

    def images_to_imitate(self, prompts: Sequence[Prompt]) -> list[ImageKeys]:
        """Keys of the images of each rank's prompts in a step of supervised fine-tuning, and of the dummy's."""
        images = [image for prompt in prompts for image in prompt.images] if self.shards_tower else []
        of_dummy = _keys(dummy_prompt(images, self.image_token_id).images)
        return [
            of_dummy | _keys(image for prompt in share for image in prompt.images)
            for share in deal_in_turn(prompts, self.num_ranks)
        ]

    def _dummy(self, groups: Sequence[SampleGroup]) -> Prompt:
        images = [image for group in groups for image in group.images] if self.shards_tower else []
        return dummy_prompt(images, self.image_token_id)


def unsplittable_tokens(groups: Sequence[SampleGroup]) -> int:
    """Tokens of the longest completion with its prompt, less than which no micro-batch of the groups can have."""
    return max(
        (group.prompt.num_tokens + len(sample.token_ids_T) - 1 for group in groups for sample in group.samples),
        default=0,
    )


def tokens_beside_engine(train: Train, groups: Sequence[SampleGroup], limit_tokens: int) -> int:
    """Largest micro-batch of passes beside an engine that is awake: the largest group, its prompt counted once.

    Rows of a fixed length keep that length.
    """
    if not train.variable_seq_lengths:
        return limit_tokens
    tokens = (group.prompt.num_tokens + sum(len(s.token_ids_T) for s in group.samples) for group in groups)
    return min(limit_tokens, max(tokens, default=0))


def deal_in_turn(examples: Sequence[T], num_ranks: int) -> list[Sequence[T]]:
    """Examples of each rank in a step of supervised fine-tuning."""
    return [examples[rank::num_ranks] for rank in range(num_ranks)]


def dummy_prompt(images: Sequence[PromptImage], image_token_id: int) -> Prompt:
    """Prompt of one text token and the smallest of these images, if there are any."""
    # an image of the batch and no made-up one: the tensors of an image differ by family
    chosen = sorted(images, key=lambda image: image.num_tokens)[:1]
    ids = np.array([0] + [image_token_id] * sum(image.num_tokens for image in chosen))
    return Prompt(token_ids_L=ids, unexpanded_ids_U=ids, images=tuple(chosen))


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Passes of the update of one step."""

    algorithm: Algorithm
    plain_update_every_steps: int
    step: int
    """Updates before it."""

    @property
    def is_plain(self) -> bool:
        """True if it reuses no activations, and compares the log-probs of all groups with the engine's."""
        return self.step % self.plain_update_every_steps == 0

    def minibatches(self, epoch: int, groups: Sequence[SampleGroup]) -> list[Sequence[SampleGroup]]:
        """Groups of each optimizer step of an epoch: of the batch in order in the first, and shuffled in later ones."""
        if epoch > 0 and self.algorithm.minibatches > 1:
            # seeded only by counters, so that a resumed run shuffles like an uninterrupted one, and all ranks alike
            shuffled = np.random.default_rng((self.step, epoch)).permutation(len(groups))
            groups = [groups[index] for index in shuffled]
        # of nearly equal size, none of them empty
        bounds = np.linspace(0, len(groups), self.algorithm.minibatches + 1).astype(int)
        return [groups[a:b] for a, b in pairwise(bounds) if b > a]

    def passes(self, batch: Batch) -> list[Sequence[SampleGroup]]:
        """Groups that are dealt together, of all passes of the update."""
        # epochs of a single minibatch are alike
        epochs = self.algorithm.ppo_epochs if self.algorithm.minibatches > 1 else 1
        trained = [groups for epoch in range(epochs) for groups in self.minibatches(epoch, batch.groups)]
        return [*([batch.left_out] if self.is_plain else []), *trained]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesByRank:
    """The images that each rank of a policy needs for a call, by their keys."""

    policy: Deal
    reference: Deal | None
    """None where there is no reference model apart."""
    schedule: Schedule
    limit_tokens: int
    """Largest micro-batch in effect, which is below the settings' after memory ran out."""
    shares: tuple[int, ...] = ()
    """The share of the micro-batches that each worker has a part in, by rank; empty where each has its own."""

    def to_annotate(
        self, batch: Batch, *, policy_passes: bool, reference_passes: bool, beside_engine: bool
    ) -> list[ImageKeys]:
        deals = [self.policy] if policy_passes else []
        deals += [self.reference or self.policy] if reference_passes else []
        limit = self.limit_tokens
        if beside_engine:
            limit = tokens_beside_engine(self.policy.train, batch.groups, limit)
        return self._union(deal.images_of_ranks(batch.groups, limit) for deal in deals)

    def to_update(self, batch: Batch) -> list[ImageKeys]:
        passes = self.schedule.passes(batch)
        return self._union(self.policy.images_of_ranks(groups, self.limit_tokens) for groups in passes)

    def to_imitate(self, prompts: Sequence[Prompt]) -> list[ImageKeys]:
        return self._of_workers(self.policy.images_to_imitate(prompts))

    def _union(self, passes: Iterable[Sequence[ImageKeys]]) -> list[ImageKeys]:
        keys: list[ImageKeys] = [frozenset()] * self.policy.num_ranks
        for of_ranks in passes:
            keys = [mine | more for mine, more in zip(keys, of_ranks, strict=True)]
        return self._of_workers(keys)

    def _of_workers(self, keys: list[ImageKeys]) -> list[ImageKeys]:
        return [keys[share] for share in self.shares] if self.shares else keys


def _keys(images: Iterable[PromptImage]) -> ImageKeys:
    return frozenset(image.key for image in images)
