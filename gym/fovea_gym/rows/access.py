"""Settings for reaching data files; importing them imports no reader."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fovea_gym.rows.readers.parquet import GroupCache


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlLimits:
    """Limits of one download, most of them settings of the same names in `config.Data`."""

    max_mib: float = 32.0
    timeout_seconds: float = 20.0
    max_redirects: int = 5
    retries: int = 2
    """Further tries where the server is busy, broken or unreachable."""
    allow_private_addresses: bool = False


def _group_cache() -> GroupCache:
    from fovea_gym.rows.readers.parquet import GroupCache  # noqa: PLC0415 (pyarrow takes as long as all the rest)

    return GroupCache()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAccess:
    """Settings for reaching data files, named as in `config.Data`."""

    cache_dir: Path = Path("~/.cache/fovea")
    image_root: str | None = None
    url_limits: UrlLimits = field(default_factory=UrlLimits)
    cache: GroupCache = field(default_factory=_group_cache)
    """Decoded row groups, shared by all Parquet files so that its bound holds for the run."""

    @property
    def copies(self) -> Path:
        """The folder of local copies of data files."""
        return self.cache_dir.expanduser() / "rows"
