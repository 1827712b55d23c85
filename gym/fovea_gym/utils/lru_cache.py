"""A least-recently-used cache with a limit on the bytes of its values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class LRUCache(Generic[Key, Value]):
    """A cache of values with a total of at most `max_bytes`; the least recently used value is evicted first.

    The newest `min_values` values stay, whatever their size. Not thread-safe: the caller must hold a lock.
    """

    def __init__(self, max_bytes: float, *, min_values: int = 0) -> None:
        self._max_bytes = max_bytes
        self._min_values = min_values
        self._entries: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Total size of the values in bytes."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def get(self, key: Key) -> Value | None:
        """The value of a key, which becomes the most recently used; None if the key is not in the cache."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def put(self, key: Key, value: Value, num_bytes: int) -> None:
        """Insert or replace a value as the most recently used; a value above the limit is evicted at once."""
        self.discard(key)
        self._entries[key] = value, num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes and len(self._entries) > self._min_values:
            _, (_, size) = self._entries.popitem(last=False)
            self._num_bytes -= size

    def discard(self, key: Key) -> None:
        """Remove a key if it is in the cache."""
        if key in self._entries:
            self._num_bytes -= self._entries.pop(key)[1]
