"""Dense rows stay dense, and each row that stays is moved once at most."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fovea.rollout.embedded.cache import fill_holes, grown_capacity


def test_the_last_live_rows_fill_the_holes() -> None:
    moves = fill_holes(6, [1, 4])
    assert (moves.sources, moves.targets, moves.count) == ((5,), (1,), 4)
    rows = list("abcdef")
    moves.in_list(rows)
    assert rows == list("afcd")


@given(st.integers(1, 40).flatmap(lambda count: st.tuples(st.just(count), st.sets(st.integers(0, count - 1)))))
def test_whatever_ends_the_rest_stays(case: tuple[int, set[int]]) -> None:
    count, ended = case
    moves, rows = fill_holes(count, sorted(ended)), list(range(count))
    moves.in_list(rows)
    assert sorted(rows) == sorted(set(range(count)) - ended)
    assert len(moves.sources) <= len(ended)


def test_room_doubles() -> None:
    assert [grown_capacity(0, 3), grown_capacity(3, 3), grown_capacity(3, 4), grown_capacity(3, 50)] == [3, 3, 6, 50]
