"""Groups dealt to ranks: what may not be lost, and how long ranks wait for each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.train.row_assignment import (
    Cost,
    GroupSlice,
    align_ranks,
    imbalance,
    pack_by_cost,
    rows_by_cost,
    rows_by_count,
    slice_groups,
    unevenness,
)
from tests.train.sample_groups import CACHED, FULL, PLAIN, TRAINED, group


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12), num_ranks=st.integers(1, 4))
def test_every_part_is_dealt_once_and_no_rank_has_much_more_than_another(lengths: list[int], num_ranks: int) -> None:
    parts = slice_groups([group(length, 1) for length in lengths])
    shares = rows_by_count(parts, Cost(work=PLAIN, passes=TRAINED), num_ranks, groups_per_row=len(lengths))
    ranks = [[part for row in rows for part in row] for rows in shares]
    assert sorted(part.first_sample for rank in ranks for part in rank) == list(range(len(lengths)))
    totals = [sum(part.num_tokens for part in rank) for rank in ranks]
    assert len(totals) == num_ranks
    assert max(totals) - min(totals) <= max(lengths), "the last part went to the rank with the least"
    assert all(rank == sorted(rank, key=lambda part: part.first_sample) for rank in ranks)


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    num_ranks=st.integers(1, 4),
    max_tokens=st.integers(20, 60),
)
def test_rows_of_all_ranks_hold_every_part_once_within_the_budget(
    lengths: list[int], num_ranks: int, max_tokens: int
) -> None:
    parts = slice_groups([group(length, 1) for length in lengths])
    ranks = rows_by_cost(parts, Cost(work=PLAIN, passes=TRAINED), num_ranks, max_tokens)
    rows = [row for rows in ranks for row in rows]
    assert sorted(part.first_sample for row in rows for part in row) == list(range(len(lengths)))
    assert all(len(row) == 1 or sum(part.num_tokens for part in row) <= max_tokens for row in rows)
    assert max(map(len, ranks)) - min(map(len, ranks)) <= (1 if num_ranks > 1 else 0)


def test_fillers_even_out_rows_and_bring_an_image_where_there_is_none() -> None:
    text, image, dummy = slice_groups([group(4, 2), group(4, 2, grid=(1, 2, 2)), group(2, grid=(1, 2, 2))])
    assert align_ranks([[[text], [image]], [[image]]], dummy) == [[[text, dummy], [image]], [[image], [dummy]]]


def test_fillers_without_an_image_leave_rows_as_they_are() -> None:
    text, dummy = slice_groups([group(4, 2), group(1)])
    assert align_ranks([[[text]], []], dummy) == [[[text]], [[dummy]]]
    assert align_ranks([[[text]]], dummy) == [[[text]]], "a process by itself"


def test_text_and_vision_are_balanced_apart() -> None:
    """Four groups of equal cost, two of them nearly all vision: each rank gets one of these."""
    cost = Cost(work=FULL, passes=TRAINED)
    seeing = [group(2, 1, grid=(1, 4, 4)) for _ in range(2)]
    reading = [group(20, 20, 6) for _ in range(2)]
    slices = slice_groups([*seeing, *reading])
    ranks = rows_by_cost(slices, cost, 2, max_tokens=10_000)
    assert [[[each.group.images != () for each in row] for row in rows] for rows in ranks] == [[[True, False]]] * 2
    assert imbalance(ranks, cost) == 1
    apart = [[slices[:2]], [slices[2:]]]
    assert imbalance(apart, cost) > 1.9, "as slow as one rank"


def test_ranks_wait_for_nobody_who_is_not_slower() -> None:
    """By hand: rows of 3 and 1 beside rows of 2 and 2 take 3 + 2, and a rank has 4 on average."""
    cost = Cost(work=PLAIN, passes=CACHED)
    rows = [[slice_groups([group(tokens, 1)]) for tokens in of_rank] for of_rank in ([3, 1], [2, 2])]
    assert imbalance(rows, cost) == 5 / 4
    assert unevenness(rows, cost) == 3 / 2, "3 over the mean of 3, 1, 2 and 2"
    assert unevenness(rows[1:], cost) == 1


def unequal_groups(rng: np.random.Generator) -> list[GroupSlice]:
    """Images of 4, 16 or 64 patches, and answers of 2 to 59 tokens."""
    sides = rng.choice([2, 4, 8], size=128, p=[0.6, 0.2, 0.2]).tolist()
    return slice_groups([group(10, *rng.integers(2, 60, size=4).tolist(), grid=(1, side, side)) for side in sides])


def test_ranks_wait_less_than_where_each_packs_its_own_share_of_one_cost() -> None:
    """Against groups dealt by the longest-processing-time-first rule on their whole cost, and packed rank by rank."""
    cost = Cost(work=replace(PLAIN, patch=16), passes=TRAINED)
    ours, apart = [], []
    for seed in range(4):
        slices = unequal_groups(np.random.default_rng(seed))
        budget = int(8 * np.mean([cost.of(each.group) for each in slices]))
        dummy = slice_groups([group(1)])[0]
        ours.append(imbalance(align_ranks(rows_by_cost(slices, cost, 8, budget), dummy), cost))
        packed = [pack_by_cost(share, cost, budget) for share in longest_first(slices, cost, 8)]
        apart.append(imbalance(align_ranks(packed, dummy), cost))
    assert np.mean(ours) < 1.1 < 1.2 < np.mean(apart)


def longest_first(slices: list[GroupSlice], cost: Cost, num_ranks: int) -> list[list[GroupSlice]]:
    shares: list[list[GroupSlice]] = [[] for _ in range(num_ranks)]
    for each in sorted(slices, key=lambda each: -cost.of(each.group)):
        min(shares, key=lambda share: sum(cost.of(other.group) for other in share)).append(each)
    return shares
