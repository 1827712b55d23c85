"""Rows of even work for every rank, and equal completions that are in a row once."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.config.algorithm import Algorithm
from fovea.models.flops import Passes, Work
from fovea.models.plain import PlainVLM
from fovea.models.vlm import VLM
from fovea.samples import with_old_logprobs
from fovea.train.microbatches import cost_of
from fovea.train.packing import Continuation, pack_conversations
from fovea.train.row_assignment import (
    Cost,
    GroupSlice,
    RowAssignment,
    align_ranks,
    balanced_bins,
    imbalance,
    pack_by_cost,
    pack_by_count,
    rows_by_cost,
    rows_by_count,
    slice_groups,
    unevenness,
)
from fovea.train.schedule import ImagesByRank, UpdatePasses
from fovea.types import Batch, PromptImage, Sample, SampleGroup
from tests.policies import (
    GRADIENT_TOLERANCE,
    REPEATED,
    make_batch,
    make_policy,
    micro_batcher,
    repeated,
    train_settings,
    update_gradients,
)
from tests.records import sample_of, text_prompt
from tests.reference import largest_relative_difference
from tests.tiny_models import CPU, DENSE_FAMILIES, image, renderer, tiny, user
from tests.train.recording_pair import Pair, reusing_and_plain

TRAINED_PASSES = Passes(linear=3, attention=3, vision=3, vision_attention=3)
CACHED = Passes(linear=3, attention=3, vision=0, vision_attention=0)
PLAIN = Work(token=2, pair=0, action=0, patch=0, image_pair=0, window_pair=0, window_side=0)
"""Tokens are all there is."""
FULL = Work(token=2, pair=4, action=6, patch=8, image_pair=10, window_pair=0, window_side=0)


def group(prompt_tokens: int, *completions: int, grid: tuple[int, int, int] | None = None) -> SampleGroup:
    images = () if grid is None else (PromptImage(key="", tensors={}, num_tokens=1, grid=grid),)
    prompt = replace(text_prompt(range(prompt_tokens)), images=images)
    return SampleGroup(prompt=prompt, samples=tuple(sample(tokens) for tokens in completions))


COMPLETIONS = st.lists(st.integers(1, 9), min_size=1, max_size=4)
FIRST_IDS = itertools.count()
"""No two completions begin alike: equal ones would share their tokens."""


def sample(tokens: int) -> Sample:
    return sample_of(next(FIRST_IDS) + np.arange(tokens), advantages_T=np.zeros(tokens, dtype=np.float32))


def samples_by_number(rows: list[list[GroupSlice]]) -> dict[int, Sample]:
    pairs = [pair for row in rows for part in row for pair in zip(part.sample_numbers, part.group.samples, strict=True)]
    assert len(dict(pairs)) == len(pairs), "a sample twice"
    return dict(pairs)


def test_the_cost_of_a_group_by_hand() -> None:
    """Prompt of 3, completions of 3 and 1, an image of 2 patches, in units of a token (2 operations)."""
    tokens, pairs, actions, image = 3 + 2, (1 + 2 + 3) + (4 + 5), 3 + 1, 2 * 8 + 4 * 10
    made, cached = (
        Cost(work=FULL, passes=passes).of(group(3, 3, 1, grid=(1, 1, 2))) for passes in (TRAINED_PASSES, CACHED)
    )
    assert made == tokens + (pairs * 4 + actions * 6 + image) / 2
    assert cached == made - image / 2
    # attention counts three passes where frozen layers count two
    lora = Cost(work=FULL, passes=Passes(linear=2, attention=3, vision=0, vision_attention=0))
    assert lora.of(group(3, 1)) == pytest.approx(3 + 6 / 2 + (3 / 2) * 6 * 4 / 2)


@settings(max_examples=100, deadline=None)
@given(costs=st.lists(st.integers(1, 60), min_size=1, max_size=5), budget=st.integers(20, 90))
def test_rows_keep_to_the_budget_and_are_near_the_best_cut(costs: list[int], budget: int) -> None:
    rows = balanced_bins(costs, budget)
    assert sorted(index for row in rows for index in row) == list(range(len(costs)))
    totals = [sum(costs[index] for index in row) for row in rows]
    assert all(len(row) == 1 or total <= budget for row, total in zip(rows, totals, strict=True))
    best = best_largest(costs, len(rows))
    assert max(totals) <= best * (4 / 3 - 1 / (3 * len(rows))) + 1e-9, "Graham's bound"


def best_largest(costs: list[int], num_rows: int) -> int:
    """By trying every assignment."""
    return min(
        max(sum(c for c, row in zip(costs, rows, strict=True) if row == wanted) for wanted in range(num_rows))
        for rows in itertools.product(range(num_rows), repeat=len(costs))
    )


def test_the_number_of_rows_is_what_the_total_needs() -> None:
    assert balanced_bins([10] * 6, 30) == [[0, 2, 4], [1, 3, 5]]
    assert balanced_bins([10] * 6, 60) == [[0, 1, 2, 3, 4, 5]]
    assert balanced_bins([], 30) == []
    # 20 = 2 rows of 10 would do (5 + 5, 4 + 4 + 2), but longest-first pairs 5 with 4
    assert balanced_bins([5, 5, 4, 4, 2], 10) == [[0, 4], [1], [2, 3]]
    # first come, first served makes 90 and 10 of these; longest-first 50 and 50
    assert balanced_bins([40, 30, 20, 10], 90) == [[0, 3], [1, 2]]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), COMPLETIONS), min_size=1, max_size=6), st.integers(20, 60))
def test_every_sample_is_in_one_row_with_its_prompt(sizes: list[tuple[int, list[int]]], max_tokens: int) -> None:
    """And number."""
    groups = [group(prompt, *completions) for prompt, completions in sizes]
    rows = pack_by_cost(slice_groups(groups, max_tokens), Cost(work=FULL, passes=CACHED), max_tokens)
    found = samples_by_number(rows)
    for number, expected in enumerate(sample for each in groups for sample in each.samples):
        assert found[number] is expected
    for row in rows:
        assert sum(part.num_tokens for part in row) <= max_tokens
    prompts = {id(s): each.prompt for each in groups for s in each.samples}
    assert all(prompts[id(s)] is part.group.prompt for row in rows for part in row for s in part.group.samples)


def test_images_and_attention_fill_a_row_too() -> None:
    cost = Cost(work=FULL, passes=TRAINED_PASSES)
    groups = [group(4, 2, 2, grid=(1, 2, 2))] * 4
    budget, costs = math.ceil(2 * cost.of(groups[0])), (cost, Cost(work=PLAIN, passes=TRAINED_PASSES))
    by_work, by_tokens = (pack_by_cost(slice_groups(groups), each, budget) for each in costs)
    assert ([len(row) for row in by_work], [len(row) for row in by_tokens]) == ([2, 2], [4])


def test_a_group_that_fits_by_its_tokens_is_never_split() -> None:
    whole = group(10, 5, 5, grid=(1, 8, 8))
    cost = Cost(work=FULL, passes=TRAINED_PASSES)
    assert cost.of(whole) > 100
    parts = slice_groups([whole, whole], 20)
    assert pack_by_cost(parts, cost, 20) == [[part] for part in slice_groups([whole, whole])]


def test_a_group_whose_tokens_do_not_fit_is_split_by_samples() -> None:
    rows = pack_by_cost(slice_groups([group(10, 6, 6, 6)], 20), Cost(work=PLAIN, passes=TRAINED_PASSES), 20)
    assert [[(len(part.group.samples), part.num_tokens) for part in row] for row in rows] == [[(2, 20)], [(1, 15)]]


def test_a_fixed_number_of_groups_keeps_their_order() -> None:
    rows = pack_by_count(slice_groups([group(3, 2, 2), group(5, 1), group(4, 3)]), 2)
    assert [[part.first_sample for part in row] for row in rows] == [[0, 2], [3]]


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12), num_ranks=st.integers(1, 4))
def test_every_part_is_dealt_once_and_no_rank_has_much_more_than_another(lengths: list[int], num_ranks: int) -> None:
    parts = slice_groups([group(length, 1) for length in lengths])
    shares = rows_by_count(parts, Cost(work=PLAIN, passes=TRAINED_PASSES), num_ranks, groups_per_row=len(lengths))
    ranks = [[part for row in rows for part in row] for rows in shares]
    assert sorted(part.first_sample for rank in ranks for part in rank) == list(range(len(lengths)))
    totals = [sum(part.num_tokens for part in rank) for rank in ranks]
    assert len(totals) == num_ranks
    assert max(totals) - min(totals) <= max(lengths), "the last part went to the rank with the least"
    assert all(rank == sorted(rank, key=lambda part: part.first_sample) for rank in ranks)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 4), st.integers(20, 60))
def test_rows_hold_every_part_once_within_the_budget(lengths: list[int], num_ranks: int, max_tokens: int) -> None:
    parts = slice_groups([group(length, 1) for length in lengths])
    ranks = rows_by_cost(parts, Cost(work=PLAIN, passes=TRAINED_PASSES), num_ranks, max_tokens)
    rows = [row for rows in ranks for row in rows]
    assert sorted(part.first_sample for row in rows for part in row) == list(range(len(lengths)))
    assert all(len(row) == 1 or sum(part.num_tokens for part in row) <= max_tokens for row in rows)
    assert max(map(len, ranks)) - min(map(len, ranks)) <= (1 if num_ranks > 1 else 0)


def test_fillers_even_out_rows_and_bring_an_image_where_there_is_none() -> None:
    text, image, dummy = slice_groups([group(4, 2), group(4, 2, grid=(1, 2, 2)), group(2, grid=(1, 2, 2))])
    assert align_ranks([[[text], [image]], [[image]]], dummy) == [[[text, dummy], [image]], [[image], [dummy]]]
    text, dummy = slice_groups([group(4, 2), group(1)])  # without an image it leaves rows as they are
    assert align_ranks([[[text]], []], dummy) == [[[text]], [[dummy]]]
    assert align_ranks([[[text]]], dummy) == [[[text]]], "a process by itself"


def test_text_and_vision_are_balanced_apart() -> None:
    """Four groups of equal cost, two of them nearly all vision: each rank gets one of these."""
    cost = Cost(work=FULL, passes=TRAINED_PASSES)
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
    cost = Cost(work=replace(PLAIN, patch=16), passes=TRAINED_PASSES)
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


def test_workers_of_one_share_get_the_images_that_it_imitates() -> None:
    parts = tiny("qwen3_vl")
    prompts = [renderer(parts).prompt(user(image(seed), "How many?")) for seed in range(2)]
    assignment = RowAssignment(
        train=train_settings(),
        cost=cost_of(VLM(parts.network, parts.processor.banned_ids)),
        num_ranks=2,
        image_token_id=parts.processor.family.image_token_id,
        shards_tower=False,
    )
    schedule = UpdatePasses(algorithm=Algorithm(), plain_update_every_steps=1, step=0)
    images = ImagesByRank(policy=assignment, reference=None, schedule=schedule, limit_tokens=100, shares=(0, 0, 1, 1))
    first, second = [frozenset(each.key for each in prompt.images) for prompt in prompts]
    assert images.to_imitate(prompts) == [first, first, second, second]


def alone(batch: Batch) -> Batch:
    """Each sample in a separate group, which shares nothing: the slow twin."""
    return Batch(groups=tuple(replace(g, samples=(sample,)) for g in batch.groups for sample in g.samples))


@pytest.mark.parametrize("max_tokens", [10_000, 75])
@pytest.mark.parametrize("loss", [{"name": "clip", "clip_high": 0.3}, {"name": "gspo"}, {"name": "cispo"}], ids=str)
def test_gradient_and_metrics_are_those_of_samples_that_share_nothing(loss: dict[str, Any], max_tokens: int) -> None:
    results = []
    for change in (repeated, lambda batch: alone(repeated(batch))):
        parts = tiny("qwen3_vl")
        algorithm = Algorithm.model_validate({"entropy_coef": 0.1, "loss": loss, "importance_sampling_fix": True})
        policy = make_policy(parts, algorithm=algorithm, max_tokens_per_microbatch=max_tokens)
        batch = change(make_batch(parts))
        logprobs = policy.logprobs(batch)
        gradient, metrics = update_gradients(policy, batch), policy.update(batch)
        for name in ("memory/activations_gib", "microbatch/max_tokens", "balance/microbatches", "update_tflop"):
            del metrics[name]
        results.append((gradient, metrics, np.concatenate(logprobs)))
    (shared, shared_metrics, shared_logprobs), (single, single_metrics, single_logprobs) = results
    assert largest_relative_difference(single, shared) < GRADIENT_TOLERANCE
    assert shared_metrics == pytest.approx(single_metrics, rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(shared_logprobs, single_logprobs, atol=1e-5)


def test_a_row_holds_equal_completions_once_and_all_their_actions() -> None:
    parts = tiny("qwen3_vl")
    batch = make_batch(parts)
    (micro,), (of_unequal,) = (micro_batcher(parts).micro_batches(x.groups) for x in (repeated(batch), batch))
    assert micro.row.num_tokens == of_unequal.row.num_tokens
    lengths = [len(g.samples[place].token_ids_T) for g in batch.groups for place in REPEATED]
    assert micro.lengths == tuple(lengths)
    assert micro.row.num_actions == len(micro.weights_A) == sum(lengths)


def test_the_plain_path_shares_them_too() -> None:
    parts = tiny("qwen3_vl")
    (micro,) = micro_batcher(parts).micro_batches(repeated(make_batch(parts)).groups)
    fast = make_policy(parts).vlm(micro.row, temperature=0.9, chunk_tokens=1000)
    plain = PlainVLM(tiny("qwen3_vl").network, parts.processor.banned_ids)(
        micro.row, temperature=0.9, chunk_tokens=1000
    )
    torch.testing.assert_close(plain.logprobs_A, fast.logprobs_A, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_they_are_read_from_the_tape_once(family: str) -> None:
    pairs = reusing_and_plain(
        lambda: Pair(tiny(family)), lambda pair: [[first, second] * 2 for first, second, *_ in pair.rollout(n=4)]
    )
    assert [pair.metrics["reused_frac"] for pair in pairs] == [1, 0]
    for pair in pairs:
        (micro,) = micro_batcher(tiny(family)).micro_batches(pair.batch.groups)
        unequal = sum(len(sample.token_ids_T) - 1 for group in pair.batch.groups for sample in group.samples[:2])
        assert micro.row.num_tokens == unequal + sum(prompt.num_tokens for prompt in pair.prompts)
        assert pair.metrics["actions_trained"] == sum(len(sample.token_ids_T) for sample in pair.batch.samples)


def test_samples_that_differ_in_actions_or_images_alone_share_nothing() -> None:
    parts = tiny("qwen3_vl")
    prompt = renderer(parts).prompt(user(image(0), "How many?"))
    pad = parts.processor.family.image_token_id
    images = [renderer(parts).prompt(user(image(number), "?")).images for number in (1, 2)]
    ids_T = np.array([5, 6, *[pad] * images[0][0].num_tokens, 7, 8])
    masks = np.zeros((2, len(ids_T)), dtype=np.bool_)
    masks[:, [0, -1]], masks[1, 1] = True, True
    each = [
        Continuation(token_ids_T=ids_T, mask_T=masks[a], images=images[b]) for a, b in ((0, 0), (1, 0), (0, 1), (0, 0))
    ]
    row = pack_conversations(parts.processor.family, [prompt], [each], CPU)
    assert row.layout.lengths == ((prompt.num_tokens, (len(ids_T) - 1,) * 3),)
    assert row.computed_A.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1]
    assert len(row.images) == 4


def test_cost_and_budget_count_what_is_computed() -> None:
    batch = make_batch(tiny("qwen3_vl"))
    single, double = batch.groups[0], repeated(batch).groups[0]
    num_tokens, of_double = (GroupSlice(group=group, first_sample=0).num_tokens for group in (single, double))
    assert of_double == num_tokens
    cost = Cost(work=FULL, passes=TRAINED_PASSES)
    assert cost.of(double) == cost.of(single)
    assert len(slice_groups([double], num_tokens)) == 1
    # 4, 0 and 6 tokens: 0 1 0 | 2 1 | 0
    small = slice_groups([double], single.prompt.num_tokens + 7)
    assert [len(part.group.samples) for part in small] == [3, 2, 1]


def test_old_logprobs_of_copies_are_their_own() -> None:
    """What a copy brings with it is not taken from the first of its kind."""
    parts = tiny("qwen3_vl")
    parts = tiny("qwen3_vl")
    batch = repeated(make_batch(parts))
    numbers = [np.full(len(s.token_ids_T), float(number), np.float32) for number, s in enumerate(batch.samples)]
    (micro,) = micro_batcher(parts).micro_batches(with_old_logprobs(batch, numbers).groups)
    assert micro.old_logprobs_A.tolist() == np.concatenate(numbers).tolist()
