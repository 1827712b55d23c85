"""Standard output of tools, kept out of the console of the run."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import TextIO

MAX_KEPT_CHARACTERS = 200
_CALL: ContextVar[io.StringIO | None] = ContextVar("call", default=None)


class _Router(io.TextIOBase):
    """Standard output that gives a call's text to the call, and any other to the stream below."""

    def __init__(self, below: TextIO) -> None:
        self.below = below

    def write(self, text: str) -> int:
        call = _CALL.get()
        if call is None:
            return self.below.write(text)
        call.write(text[: max(0, MAX_KEPT_CHARACTERS - call.tell())])
        return len(text)

    def flush(self) -> None:
        self.below.flush()

    def fileno(self) -> int:
        return self.below.fileno()

    def isatty(self) -> bool:
        return self.below.isatty()


class PrintedText:
    """Keeps what calls print; calls may overlap, in tasks of one event loop and in threads that they start."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_calls = 0

    @contextmanager
    def of_call(self) -> Iterator[io.StringIO]:
        """The beginning of what is printed within the block, also by `asyncio.to_thread`."""
        kept = io.StringIO()
        token = _CALL.set(kept)
        self._count(1)
        try:
            yield kept
        finally:
            self._count(-1)
            _CALL.reset(token)

    def _count(self, change: int) -> None:
        """Route standard output while any call runs."""
        with self._lock:
            if self._num_calls == 0:
                sys.stdout = _Router(sys.stdout)
            self._num_calls += change
            if self._num_calls == 0 and isinstance(sys.stdout, _Router):
                sys.stdout = sys.stdout.below
