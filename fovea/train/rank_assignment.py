"""Assignment of groups to ranks, in rows that keep ranks from waiting for each other.

Ranks with sharded weights enter every layer together: in a micro-batch all wait for the rank with the most vision work,
and then for the one with the most text. Rows of all ranks are therefore filled at once, with text and vision balanced
apart, and rows that are alike run side by side.

Axes: `R` bins (rows, or ranks), 2 = cost of text and of vision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fovea.train.microbatching import Cost, GroupSlice, RowSlices, pack_by_cost, pack_by_count
from fovea.types import SampleGroup


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
    """The rows of each rank with the slices of one group alone."""
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
