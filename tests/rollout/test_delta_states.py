"""States of delta nets during a rollout: what is in memory, and which rows move with which states."""

from __future__ import annotations

import torch

from fovea.models.delta_rule import DeltaShape, DeltaState
from fovea.rollout.embedded.cache import fill_holes
from fovea.rollout.embedded.requests import KeptKeys
from fovea.rollout.embedded.states import DeltaStates
from tests.host_bytes import HostBytes
from tests.meta_device import META, NoPageableCopies

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
