"""A table as one test hides no row that fails."""

from __future__ import annotations

import inspect

import pytest

from tests.tables import table


def test_every_row_that_fails_is_listed_with_what_was_found() -> None:
    @table(("number", "square"), [(2, 4), (3, 8), (4, 17), ("5", 25)])
    def squares(number: int, square: int) -> None:
        found = number * number
        assert found == square, f"found {found}"

    with pytest.raises(AssertionError) as caught:
        squares()
    first, *rows = str(caught.value).splitlines()
    assert first == "3 of 4 rows fail:"
    assert [line for line in rows if line.startswith("(3, 8): AssertionError: found 9")]
    assert [line for line in rows if line.startswith("(4, 17): AssertionError: found 16")]
    assert [line for line in rows if line.startswith("('5', 25): TypeError: ")]


def test_an_expected_error_that_does_not_come_fails_its_row() -> None:
    @table("text", ["1", "x"])
    def no_number(text: str) -> None:
        with pytest.raises(ValueError, match="invalid literal"):
            int(text)

    with pytest.raises(AssertionError, match=r"1 of 2 rows fail:\n'1': Failed: DID NOT RAISE"):
        no_number()


def test_a_table_without_rows_is_refused() -> None:
    with pytest.raises(AssertionError, match="without rows"):
        table("x", [])


def test_tables_are_crossed_and_take_fixtures() -> None:
    seen = []

    @pytest.mark.slow
    @table("x", [1, 2])
    @table("y", [3, 4])
    def crossed(x: int, y: int, factor: int) -> None:
        seen.append((factor, x, y))

    assert list(inspect.signature(crossed).parameters) == ["factor"]
    assert [mark.name for mark in crossed.pytestmark] == ["slow"]
    crossed(factor=10)
    assert seen == [(10, 1, 3), (10, 1, 4), (10, 2, 3), (10, 2, 4)]
