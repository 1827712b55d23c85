"""States of delta nets in the embedded engine: no way of running rows changes a completion, and they are counted."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from fovea.models.decoder import decoder_shape
from fovea.models.delta_rule import DeltaShape, DeltaState
from fovea.rollout.embedded.cache import fill_holes
from fovea.rollout.embedded.requests import KeptKeys
from fovea.rollout.embedded.states import DeltaStates
from fovea.types import Completion
from tests.host_bytes import HostBytes
from tests.meta_device import META, NoPageableCopies
from tests.rollout.drawing import generate, keep_turns_of, make_engine, mixed_requests, noted_rows, noted_turns, same
from tests.rollout.two_turns import assert_same_turns, sampled
from tests.tiny_models import tiny

PARTS = tiny("qwen3_5", num_layers=4)
COUNTS = [2, 5, 1, 4, 3, 2]


@pytest.fixture(scope="module")
def alone() -> list[list[Completion]]:
    requests = zip(*mixed_requests(PARTS, len(COUNTS)), COUNTS, strict=True)
    return [list(generate(make_engine(PARTS), [p], [s], n)[0]) for p, s, n in requests]


@pytest.mark.parametrize(("tight", "pass_tokens"), [(True, 11), (False, 16_384)])
def test_no_way_of_running_changes_a_completion(
    alone: list[list[Completion]], tight: bool, pass_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that wait, chunks of prompts, rows that move, and more steps between syncs than states allow."""
    states = decoder_shape(PARTS.network.config.text_config).state_tokens(4)
    requests = zip(*mixed_requests(PARTS, len(COUNTS)), COUNTS, strict=True)
    longest = max(p.num_tokens + n * (s.max_new_tokens + states) for p, s, n in requests)
    budget = longest + 100 if tight else 200_000
    engine = make_engine(PARTS, budget, pass_tokens=pass_tokens, decode_steps_per_wait=7)
    rows = noted_rows(monkeypatch)
    together = generate(engine, *mixed_requests(PARTS, len(COUNTS)), COUNTS)
    assert all(same(a, b) for a, b in zip(alone, together, strict=True))
    joined_while_others_ran = any(before < after for before, after in pairwise(rows))
    assert joined_while_others_ran == tight


def test_turns_are_kept_by_the_memory_of_keys_and_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget of fewer tokens than a turn takes keeps none, and the same is sampled."""
    shape = decoder_shape(PARTS.network.config.text_config)
    engine = make_engine(PARTS)
    kept = noted_turns(monkeypatch)
    groups = sampled(PARTS, engine)
    assert kept
    for each, _ in kept:
        states = [x for state in each.states for x in (state.tail_RKC, state.memory_RVDF)]
        held = sum(x.nbytes for x in (*each.layers, *states))
        assert held <= each.cost_tokens * shape.token_bytes(4) < held + shape.token_bytes(4)
    keep_turns_of(min(each.cost_tokens for each, _ in kept) - 1, monkeypatch)
    kept.clear()
    assert_same_turns(groups, sampled(PARTS, make_engine(PARTS)))
    assert not any(number for _, number in kept)


LAYERS, ROWS = 12, 32
SHAPE = DeltaShape(is_delta=(True,) * LAYERS, key_heads=1, value_heads=2, key_dim=16, value_dim=16, window=4)
ROW_BYTES = SHAPE.state_bytes(4) // LAYERS
"""Size of one row's state in one layer."""


def keys_of(states: list[DeltaState]) -> KeptKeys:
    return KeptKeys(layers=(), num_tokens=1, num_images=0, states=states, cost_tokens=1)


def states_of_rows(device: torch.device) -> DeltaStates:
    """States of two prompts' rows, of which the second were added while the first ran."""
    states = DeltaStates(SHAPE, torch.empty(0, device=device))
    for _ in range(2):
        states.begin([None])
        states.branch([ROWS])
    return states


def test_states_of_one_layer_at_a_time_are_in_memory_twice() -> None:
    """Those of all layers were, when rows were added and when others finished: gigabytes for hundreds of rows."""
    with HostBytes() as adding:
        states = states_of_rows(torch.device("cpu"))
    assert adding.most < 1.2 * 2 * ROWS * LAYERS * ROW_BYTES
    with HostBytes() as moving:
        states.remove(fill_holes(2 * ROWS, [1, 4]))
    assert moving.most < 3 * ROW_BYTES, "only the rows that move are copied"
    assert [len(state.tail_RKC) for state in states.copy_row(2 * ROWS - 3)] == [1] * LAYERS


def test_rows_move_with_their_states_and_nothing_is_copied_from_pageable_memory() -> None:
    states = DeltaStates(SHAPE, torch.empty(0))
    rows = [
        DeltaState(torch.full((1, 3, sum(SHAPE.widths)), float(i)), torch.full((1, 2, 16, 16), float(i)))
        for i in range(5)
    ]
    kept = [keys_of([row] * LAYERS) for row in rows]
    states.begin(kept)
    states.branch([1, 2, 1, 0, 1])
    states.remove(fill_holes(5, [0, 2]))
    assert [float(states.copy_row(row)[-1].memory_RVDF.mean()) for row in range(3)] == [2, 1, 4]
    assert [float(states.copy_row(row)[0].tail_RKC.mean()) for row in range(3)] == [2, 1, 4]
    with NoPageableCopies():
        on_device = states_of_rows(META)
        on_device.remove(fill_holes(2 * ROWS, [1, 4]))
        on_device.copy_row(3)
        on_device.remove(fill_holes(2 * ROWS - 2, range(2 * ROWS - 2)))
