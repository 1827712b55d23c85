"""Access to data files: the settings for reaching them, and a cache. Importing this module imports no reader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from fovea_gym.utils.lru_cache import LRUCache

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlLimits:
    """Limits of one download; most are settings of the same name in `config.Data`."""

    max_image_mib: float = 32.0
    url_timeout_seconds: float = 20.0
    max_redirects: int = 5
    retries: int = 2
    """Retries when the server is busy, broken or unreachable."""
    allow_private_addresses: bool = False
    section: str = ""
    """Prefix of these settings in errors: `data.` if a recipe sets them."""


_CACHE_BYTES = 1 << 28


class GroupCache:
    """A cache of decoded row groups by (file, group), with one limit on the bytes of all files together.

    The last group read is kept even if it exceeds the limit by itself. Thread-safe.
    """

    def __init__(self, max_bytes: int = _CACHE_BYTES) -> None:
        # consecutive reads often hit the same group, so keep at least one
        self._tables: LRUCache[tuple[str, int], pa.Table] = LRUCache(max_bytes, min_values=1)
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        """Total bytes of the groups in the cache."""
        return self._tables.num_bytes

    def get(self, key: tuple[str, int], read: Callable[[], pa.Table]) -> pa.Table:
        """The group of a key, read if it is not in the cache."""
        with self._lock:
            table = self._tables.get(key)
            if table is None:
                table = read()
                self._tables.put(key, table, table.nbytes)
            return table


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAccess:
    """Settings for reaching data files, with the same names as in `config.Data`."""

    cache_dir: Path = Path("~/.cache/fovea")
    image_root: str | None = None
    url_limits: UrlLimits = field(default_factory=UrlLimits)
    section: str = ""
    """Prefix of an environment's settings in errors: `environment.` if a recipe sets them."""
    data_section: str = ""
    """Prefix of `cache_dir` and `image_root` in errors: `data.` if a recipe sets them."""
    cache: GroupCache = field(default_factory=GroupCache)
    """Decoded row groups; all Parquet files of a run share the cache and its limit."""

    @property
    def copies(self) -> Path:
        """The folder of local copies of data files."""
        return self.cache_dir.expanduser() / "rows"
