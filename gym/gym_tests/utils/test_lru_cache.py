from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from fovea_gym.utils.lru_cache import LRUCache


def filled(max_bytes: float, sizes: Sequence[int], min_values: int = 0) -> LRUCache[int, str]:
    """A cache after one value of each size, under the keys 0, 1, ..."""
    cache: LRUCache[int, str] = LRUCache(max_bytes, min_values=min_values)
    for key, size in enumerate(sizes):
        cache.put(key, str(key), size)
    return cache


def test_the_least_recently_used_is_evicted_first() -> None:
    cache = filled(3, [1, 1, 1])
    assert cache.get(0) == "0"
    cache.put(3, "3", 2)
    assert [cache.get(key) for key in range(4)] == ["0", None, None, "3"]


def test_looking_whether_a_key_is_there_does_not_use_it() -> None:
    cache = filled(2, [1, 1])
    assert 0 in cache
    cache.put(2, "2", 1)
    assert [key in cache for key in range(3)] == [False, True, True]


def test_the_newest_values_may_stay_above_the_bound() -> None:
    cache = filled(0, [5, 6], min_values=1)
    assert (cache.get(0), cache.get(1), cache.num_bytes) == (None, "1", 6)


def test_a_value_can_be_discarded() -> None:
    cache = filled(10, [1, 2])
    cache.discard(0)
    cache.discard(0)
    assert (cache.get(0), cache.num_bytes) == (None, 2)


@given(st.integers(0, 20), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=30))
def test_it_is_the_longest_run_of_recent_values_that_fits(max_bytes: int, puts: list[tuple[int, int]]) -> None:
    """Against the whole history: a value stays as long as all that came since fit beside it."""
    cache: LRUCache[int, int] = LRUCache(max_bytes)
    kept: list[tuple[int, int]] = []
    for key, size in puts:
        cache.put(key, size, size)
        kept = [entry for entry in kept if entry[0] != key] + [(key, size)]
        while sum(size for _, size in kept) > max_bytes:
            kept.pop(0)
    assert [key for key in range(6) if key in cache] == sorted(key for key, _ in kept)
    assert cache.num_bytes == sum(size for _, size in kept)
