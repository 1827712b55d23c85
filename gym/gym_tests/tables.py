"""Tables of quick cases: one test checks all rows and fails with a list of the rows that failed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import pytest

SHOWN_CHARS = 200
"""Of a row; some are texts of half a megabyte."""
Test = Callable[..., None]


def table(names: str | Sequence[str], rows: Iterable[Any]) -> Callable[[Test], Test]:
    """Take the arguments of `pytest.mark.parametrize`, and make one test of all rows; they share its fixtures."""
    listed = list(rows)
    assert listed, f"a table of {names} without rows"
    each = (names,) if isinstance(names, str) else tuple(names)

    def decorate(check: Test) -> Test:
        @wraps(check)
        def test(**fixtures: Any) -> None:
            failed = []
            for row in listed:
                values = (row,) if isinstance(names, str) else row
                try:
                    check(**fixtures, **dict(zip(each, values, strict=True)))
                except (Exception, pytest.fail.Exception) as error:
                    failed.append((f"{row!r:.{SHOWN_CHARS}}: {type(error).__name__}: {error}", error))
            if failed:
                lines = "\n".join(line for line, _ in failed)
                raise AssertionError(f"{len(failed)} of {len(listed)} rows fail:\n{lines}") from failed[0][1]

        signature = inspect.signature(check)
        left = [parameter for name, parameter in signature.parameters.items() if name not in each]
        # pytest takes it instead of the signature of the function that is wrapped
        test.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return test

    return decorate
