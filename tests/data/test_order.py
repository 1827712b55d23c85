"""The order of rows: shuffled, weighted, and the same however it is cut or resumed."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.config.loading import load_config
from fovea.data.order import EpochOrder, Order
from fovea_gym.errors import ConfigError, DataError
from fovea_gym.rows.tasks import LazyTasks, kinds_of
from fovea_gym.types import Task

KINDS = ["a"] * 7 + ["b"] * 3 + ["c"] * 5


def order(seed: int = 0, **weights: float) -> Order:
    return Order(KINDS, weights=weights, seed=seed)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 60), max_size=12), st.integers(0, 12), st.integers(0, 2**40))
def test_cuts_and_resumes_do_not_matter(cuts: list[int], resume_at: int, seed: int) -> None:
    straight = order(seed, b=2.5).take(sum(cuts))
    taken, current = [], order(seed, b=2.5)
    for step, n in enumerate(cuts):
        if step == resume_at:
            state = json.loads(json.dumps(current.state()))
            current = order(seed, b=2.5)
            current.restore(state)
        taken += current.take(n)
    assert taken == straight


def test_resume_across_a_block_and_many_shuffles() -> None:
    straight = order().take(20_000)
    first, second = order(), order()
    assert first.take(12_345) == straight[:12_345]
    second.restore(first.state())
    assert second.take(20_000 - 12_345) == straight[12_345:]


def test_rows_of_a_kind_come_once_before_any_comes_again() -> None:
    taken = order().take(3000)
    for kind in "abc":
        rows = [row for row in taken if KINDS[row] == kind]
        num_rows = KINDS.count(kind)
        passes = [rows[at : at + num_rows] for at in range(0, len(rows) - num_rows, num_rows)]
        assert all(sorted(one) == sorted(passes[0]) for one in passes)
        assert len({tuple(one) for one in passes}) > 3


def test_kinds_come_by_rows_times_weight() -> None:
    taken = order(b=4.0, c=0.2).take(50_000)
    shares = Counter(KINDS[row] for row in taken)
    for kind, weight in (("a", 7), ("b", 12), ("c", 1)):
        # four standard deviations of a binomial share are below 0.01
        assert shares[kind] / 50_000 == pytest.approx(weight / 20, abs=0.01)


def test_seeds_differ_and_repeat() -> None:
    assert order(1).take(50) == order(1).take(50)
    assert order(1).take(50) != order(2).take(50)
    assert order().take(0) == []


def test_unknown_kind_in_weights() -> None:
    with pytest.raises(ConfigError) as error:
        order(colour=2.0)
    assert str(error.value) == ("data.kind_weights weighs 'colour', but no row is of that kind; use one of a, b, c")
    with pytest.raises(ConfigError, match=r"^warmup\.kind_weights: a\b"):
        Order(KINDS, weights={"a": 0.0}, seed=0, setting="warmup.kind_weights")


def test_no_rows() -> None:
    with pytest.raises(DataError, match="no rows to draw from"):
        Order([], weights={}, seed=0)


def test_state_of_other_rows_is_refused() -> None:
    other = Order(KINDS[1:], weights={}, seed=0)
    with pytest.raises(DataError, match=r"'a': 6.*'a': 7"):
        order().restore(other.state())


def task(index: int) -> Task:
    return Task(id=f"train/{index}", question="?", answer="!", kind="even" if index % 2 == 0 else "odd")


def test_lazy_tasks_know_their_kinds_without_being_made() -> None:
    made = []

    def make(index: int) -> Task:
        made.append(index)
        return task(index)

    tasks = LazyTasks(make, range(0, 10, 3), kind_of=lambda index: "even" if index % 2 == 0 else "odd")
    assert kinds_of(tasks) == ["even", "odd", "even", "odd"]
    assert kinds_of(tasks[1:3]) == ["odd", "even"]
    assert made == []
    assert tasks[-1].id == "train/9"
    assert [one.id for one in tasks[1:3]] == ["train/3", "train/6"]
    assert made == [9, 3, 6]


def test_kinds_of_plain_tasks() -> None:
    assert kinds_of([task(0), task(1)]) == ["even", "odd"]


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
    with pytest.raises(DataError, match=r"without max_epochs and with data\.shuffle=true\b"):
        epochs.restore(kinds.state())  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"began with max_epochs, or data.shuffle=false"):
        kinds.restore(epochs.state())  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"\b7 rows\b.*\b8\b"):
        EpochOrder(8, seed=0, shuffle=True).restore(epochs.state())


def test_an_order_that_ends_before_the_position_is_refused() -> None:
    drawn = EpochOrder(7, seed=0, shuffle=True, max_epochs=3)
    drawn.take(14)
    EpochOrder(7, seed=0, shuffle=True, max_epochs=2).restore(drawn.state())
    with pytest.raises(
        ConfigError,
        match=r"\bmax_epochs=1\b.*\b14\b.*\b7\b",
    ):
        EpochOrder(7, seed=0, shuffle=True, max_epochs=1).restore(drawn.state())


@pytest.mark.parametrize("once", ["max_epochs=2", "data.shuffle=false"])
@pytest.mark.parametrize("weights", ["data.kind_weights={a: 2}", "curriculum.level_weights=[{'1': 2}]"])
def test_rows_that_come_once_have_no_weights(once: str, weights: str) -> None:
    with pytest.raises(ConfigError, match=rf"\b{once}\b.*\b{weights.partition('=')[0]}\b"):
        load_config([], ["model.tiny={}", once, weights])
