"""Access to data files: the settings for reaching them, and a cache. Importing it imports no reader."""

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
    """Limits of one download, most of them settings of the same names in `config.Data`."""

    max_image_mib: float = 32.0
    url_timeout_seconds: float = 20.0
    max_redirects: int = 5
    retries: int = 2
    """Further tries where the server is busy, broken or unreachable."""
    allow_private_addresses: bool = False
    section: str = ""
    """The words before these names in errors: `data.` where a recipe has them."""


_CACHE_BYTES = 1 << 28


class GroupCache:
    """Decoded row groups of any number of files, by (file, group), within one bound on their bytes.

    The group read last stays even if it exceeds the bound by itself. Safe to use from many threads.
    """

    def __init__(self, max_bytes: int = _CACHE_BYTES) -> None:
        # the rows of one group are often read one after another
        self._tables: LRUCache[tuple[str, int], pa.Table] = LRUCache(max_bytes, min_values=1)
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of the groups in the cache."""
        return self._tables.num_bytes

    def get(self, key: tuple[str, int], read: Callable[[], pa.Table]) -> pa.Table:
        """The group under a key, read where it is not in the cache."""
        with self._lock:
            table = self._tables.get(key)
            if table is None:
                table = read()
                self._tables.put(key, table, table.nbytes)
            return table


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAccess:
    """Settings for reaching data files, named as in `config.Data`."""

    cache_dir: Path = Path("~/.cache/fovea")
    image_root: str | None = None
    url_limits: UrlLimits = field(default_factory=UrlLimits)
    section: str = ""
    """The words before the names of an environment's settings in errors: `environment.` where a recipe has them."""
    data_section: str = ""
    """The words before `cache_dir` and `image_root` in errors: `data.` where a recipe has them."""
    cache: GroupCache = field(default_factory=GroupCache)
    """Decoded row groups, shared by all Parquet files so that its bound holds for the run."""

    @property
    def copies(self) -> Path:
        """The folder of local copies of data files."""
        return self.cache_dir.expanduser() / "rows"
