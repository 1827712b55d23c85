"""Epochs: every row exactly once in each, however the order is cut or resumed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.config.loading import load_config
from fovea.data.order import EpochOrder, Order
from fovea.errors import ConfigError, DataError


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(0, 12), st.booleans())
def test_every_row_comes_once_an_epoch(cuts: list[int], resume_at: int, shuffle: bool) -> None:
    def order() -> EpochOrder:
        return EpochOrder(7, seed=3, shuffle=shuffle, max_epochs=3)

    taken, current = list[int](), order()
    for step, n in enumerate(cuts):
        if step == resume_at:
            state = json.loads(json.dumps(current.state()))
            current = order()
            current.restore(state)
        rest = current.rest()
        assert rest is not None
        ahead = list(rest)
        rows = current.take(n)
        assert rows == ahead[:n]
        taken += rows
    assert taken == order().take(100)[: sum(cuts)]
    whole = order().take(100)
    assert [sorted(whole[start : start + 7]) for start in (0, 7, 14)] == [list(range(7))] * 3
    assert len(whole) == 21
    assert (whole == [*range(7)] * 3) is not shuffle


def test_epochs_differ_and_depend_on_the_seed() -> None:
    first, second = (EpochOrder(50, seed=seed, shuffle=True).take(100) for seed in (0, 1))
    assert first[:50] != first[50:]
    assert first != second


def test_an_order_is_resumed_by_its_own_kind_and_rows() -> None:
    epochs, kinds = EpochOrder(7, seed=0, shuffle=True), Order(["a"] * 7, weights={}, seed=0)
    with pytest.raises(DataError, match=r"without max_epochs and with data.shuffle=true; resume it in the same way"):
        epochs.restore(kinds.state())  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"began with max_epochs, or data.shuffle=false"):
        kinds.restore(epochs.state())  # type: ignore[arg-type]
    with pytest.raises(DataError, match="of 7 rows, but the data have 8"):
        EpochOrder(8, seed=0, shuffle=True).restore(epochs.state())


def test_an_order_that_ends_before_the_position_is_refused() -> None:
    drawn = EpochOrder(7, seed=0, shuffle=True, max_epochs=3)
    drawn.take(14)
    EpochOrder(7, seed=0, shuffle=True, max_epochs=2).restore(drawn.state())
    with pytest.raises(
        ConfigError,
        match=r"max_epochs=1, but the run has drawn 14 times from its 7 rows, so nothing is left to train; set a",
    ):
        EpochOrder(7, seed=0, shuffle=True, max_epochs=1).restore(drawn.state())


@pytest.mark.parametrize("once", ["max_epochs=2", "data.shuffle=false"])
@pytest.mark.parametrize("weights", ["data.kind_weights={a: 2}", "curriculum.level_weights=[{'1': 2}]"])
def test_rows_that_come_once_have_no_weights(once: str, weights: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{once} takes every row once an epoch, but {weights.partition('=')[0]} draws"
    ):
        load_config([], ["model.tiny={}", once, weights])
