"""Checks that run one after the other and print each line as it stands, so that a crash loses none of those before."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

FOVEA = str(Path(__file__).parents[2])


class CheckFailed(Exception):
    """A check found something wrong; its text says what."""


@dataclass(frozen=True, slots=True)
class Check:
    """A named check."""

    name: str
    lines: Callable[[], Iterator[str]]
    """Yields what it finds, line by line; any exception is a failure."""


def run_checks(checks: Sequence[Check], say: Callable[[str], None]) -> list[str]:
    """Run all checks, whatever becomes of those before; returns the names of those that failed."""
    started, failed = perf_counter(), list[str]()
    for check in checks:
        say(f"[{perf_counter() - started:5.1f} s] {check.name}")
        try:
            for line in check.lines():
                say(f"    {line}")
        except CheckFailed as error:
            failed.append(check.name)
            say(f"    FAILED: {error}")
        except Exception as error:  # a kernel, a driver or a package may raise anything, and the others go on
            failed.append(check.name)
            say(f"    FAILED: {_told(error)}")
    return failed


def _told(error: Exception) -> str:
    """Type and first line of an error, and the last place in Fovea that it went through."""
    first = (str(error).splitlines() or ["no message"])[0]
    places = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(FOVEA)]
    return f"{type(error).__name__}: {first} ({Path(places[-1].filename).name}:{places[-1].lineno})"
