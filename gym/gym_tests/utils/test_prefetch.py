"""Work ahead: in order, bounded, and never needed."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

import pytest

from fovea_gym.utils.event_loop import Prefetch

SECONDS = 30.0


def blocked() -> tuple[threading.Event, Callable[[], int]]:
    """An event, and work that waits for it."""
    event = threading.Event()

    def work() -> int:
        assert event.wait(SECONDS)
        return 0

    return event, work


def test_results_and_errors_come_to_who_takes_them() -> None:
    ahead: Prefetch[str, float] = Prefetch(2, "test")
    ahead.begin({"half": lambda: 1 / 2, "error": lambda: 1 / 0})
    futures = dict(ahead.ahead)
    assert futures["half"].result(SECONDS) == 0.5
    assert isinstance(futures["error"].exception(SECONDS), ZeroDivisionError)
    half, error = ahead.take("half"), ahead.take("error")
    assert half is not None
    assert half() == 0.5
    assert error is not None
    with pytest.raises(ZeroDivisionError):
        error()
    assert ahead.take("half") is None, "taken before"


def test_what_is_not_begun_is_left_to_the_caller_and_what_is_dropped_never_runs() -> None:
    event, work = blocked()
    ran: list[str] = []
    ahead: Prefetch[str, int] = Prefetch(1, "test")
    ahead.begin({"first": work, "second": lambda: ran.append("second") or 0, "third": lambda: ran.append("third") or 0})
    assert ahead.take("second") is None, "the only thread is on the first"
    ahead.begin({"fourth": lambda: 4})
    assert set(ahead.ahead) == {"fourth"}, "no more is kept than was asked for last"
    event.set()
    assert ahead.ahead["fourth"].result(SECONDS) == 4
    assert ran == []


def test_threads_end_with_their_owner() -> None:
    ahead: Prefetch[str, int] = Prefetch(3, "ends-with-owner")
    ahead.begin({"one": lambda: 1})
    del ahead
    gc.collect()
    deadline = time.monotonic() + SECONDS
    while any(thread.name == "ends-with-owner" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
