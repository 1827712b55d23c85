"""Remote data files, copied to the folder of copies and then read like local ones.

http(s) goes through `fovea_gym.rows.fetch`, with its checks; files, buckets and the Hugging Face hub through fsspec (s3://
and gs:// need the extras of these names). fsspec knows dozens of other protocols: some reach private addresses, and a
chain of several can run code.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec
import fsspec.asyn

from fovea_gym.errors import BadRowError, DataError, MissingExtraError, named
from fovea_gym.rows.access import RowAccess, UrlLimits
from fovea_gym.rows.fetch import download, fetch
from fovea_gym.rows.images import check_bytes
from fovea_gym.rows.readers.base import Table, TableView, copied_once, first_line
from fovea_gym.utils.installing import pip_install
from fovea_gym.utils.shown_text import lacks_secrets

_PART = re.compile(r"(?P<whole>.+@[^@/\[\]]*)\[(?P<bounds>[^\[\]]*)\]")
_BOUNDS = re.compile(r"(-?\d+%?)?:(-?\d+%?)?")


def split_part(source: str) -> tuple[str, str | None]:
    """A source without the part in brackets behind its `@split`, and what stands in them; None without brackets."""
    found = _PART.fullmatch(source)
    return (found["whole"].removesuffix("@"), found["bounds"]) if found else (source, None)


def part_of(tables: Sequence[Table], bounds: str, source: str, setting: str) -> list[Table]:
    """The rows of all tables together within `bounds`; DataError where these are not bounds, or hold no row."""
    num_rows = sum(map(len, tables))
    rows = range(num_rows)[_slice(bounds, num_rows, source, setting)]
    if not rows:
        raise DataError(f"{setting}: {source} leaves none of {num_rows} rows; widen the bounds in the brackets")
    parts: list[Table] = []
    start = 0
    for table in tables:
        first, last = max(rows.start - start, 0), min(rows.stop - start, len(table))
        if first < last:
            parts.append(PartOfTable(table, range(first, last)))
        start += len(table)
    return parts


def _slice(bounds: str, num_rows: int, source: str, setting: str) -> slice:
    found = _BOUNDS.fullmatch(bounds.replace(" ", ""))
    if found is None:
        raise DataError(
            f"{setting}: {source}: [{bounds}] is not a part of a split; write [:1000], [1000:], [:90%] or [-10%:]"
        )
    return slice(*(None if bound is None else _row(bound, num_rows) for bound in found.groups()))


def _row(bound: str, num_rows: int) -> int:
    return round(num_rows * int(bound[:-1]) / 100) if bound.endswith("%") else int(bound)


class PartOfTable(TableView):
    """Consecutive rows of a table, which keep the names that they have in it."""

    def __init__(self, table: Table, rows: range) -> None:
        super().__init__(table)
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, object]:
        return self._table.row(self._rows[index])

    def place(self, index: int) -> str:
        return self._table.place(self._rows[index])

    def column(self, name: str) -> Iterable[object]:
        return itertools.islice(self._table.column(name), self._rows.start, self._rows.stop)


class RemoteTable(TableView):
    """The local copy of a remote file, under the name of its URL."""

    def __init__(self, table: Table, url: str) -> None:
        super().__init__(table)
        self.folder, _, self.name = url.partition("?")[0].rpartition("/")
        self.key = url


_EXTRAS: dict[str, str | None] = {"file": None, "hf": "hub", "s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
"""Extra that a protocol needs: the protocols besides http(s) that are read."""
_CHAIN_OR_TEMPLATE = re.compile(r"::|\{\{|\{%")
"""Marks of URLs that fsspec resolves into others, by itself or with Jinja."""
_DOWNLOAD_SECONDS = 3600.0


def is_web(url: str) -> bool:
    """True if a URL is of http or https."""
    return url.startswith(("http://", "https://"))


def expand(url: str, setting: str) -> list[str]:
    """Sorted URLs of the files that match a pattern with *, ? or [; a URL without one, or of http(s), is itself."""
    _check_protocol(url, setting)
    if is_web(url) or not set("*?[") & set(url):
        return [url]
    filesystem, path = _filesystem(url, setting)
    with named(partial(_unreadable, url, setting)):
        found = sorted(filesystem.glob(path))
    if not found:
        raise DataError(f"{setting}: no file is named {url}; correct the pattern")
    return [str(filesystem.unstrip_protocol(name)) for name in found]


def local_copy(url: str, setting: str, access: RowAccess) -> Path:
    """Return a local copy of the file at a URL, made unless the same state of the file was copied before."""
    if lacks_secrets(url):
        raise DataError(
            f"{setting}: {url} had a password or key, which the settings of a run do not keep; add {setting}=[...] "
            "with the whole URL"
        )
    if is_web(url):
        return _web_copy(url, setting, access)
    filesystem, path = _filesystem(url, setting)
    with named(partial(_unreadable, url, setting)):
        state = filesystem.info(path)
        stamp = [str(state.get(key)) for key in ("size", "ETag", "etag", "mtime", "LastModified", "updated", "created")]
        place, name = _place(access.copies, url, stamp)
        named_folder = f"{access.data_section}cache_dir"
        return copied_once(place, name, lambda into: filesystem.get_file(path, str(into)), named_folder)


def remote_image(url: str, where: str, limits: UrlLimits) -> bytes:
    """Read an image on the web, in an object store or beside a remote data file; BadRowError naming `where`.

    Object stores are read with the credentials of this machine, and retry by themselves.
    """
    if is_web(url):
        return fetch(url, where, limits)
    filesystem, path = _filesystem(url, where)
    with named(partial(_bad_image, where, limits)):
        num_bytes = int(_call(filesystem, "size", path, limits) or 0)
        check_bytes(num_bytes, where, limits.max_image_mib, f"{limits.section}max_image_mib")
        content: bytes = _call(filesystem, "cat_file", path, limits)
    return content


def _call(filesystem: Any, method: str, path: str, limits: UrlLimits) -> Any:
    """A method of a filesystem, within the limit of time where the filesystem can be interrupted."""
    if not filesystem.async_impl:
        return getattr(filesystem, method)(path)
    coroutine = getattr(filesystem, f"_{method}")
    return fsspec.asyn.sync(filesystem.loop, coroutine, path, timeout=limits.url_timeout_seconds)


def _bad_image(where: str, limits: UrlLimits, error: Exception) -> BadRowError:
    if isinstance(error, FileNotFoundError):
        problem, reason = "no such image file", "image_missing"
    elif isinstance(error, TimeoutError):
        limit = f"{limits.section}url_timeout_seconds={limits.url_timeout_seconds:g}"
        problem, reason = f"it took more than {limit}", "url_timeout"
    else:
        problem, reason = f"cannot be read ({type(error).__name__}: {first_line(error)})", "url_unreachable"
    return BadRowError(f"{where}: {problem}", reason, "correct the row")


def _web_copy(url: str, setting: str, access: RowAccess) -> Path:
    """Download a file into the folder of copies."""
    limits = replace(access.url_limits, url_timeout_seconds=_DOWNLOAD_SECONDS)
    place, name = _place(access.copies, url, [])
    (place / name).unlink(missing_ok=True)  # few servers say reliably whether a file has changed

    def make(into: Path) -> None:
        try:
            with into.open("w+b") as file:
                download(url, f"{setting}: {url}", limits, file)
        except BadRowError as error:
            if error.reason == "url_private_address":
                raise
            fix = "correct the address, or download the file and name the copy"
            raise DataError(f"{error.problem}; {fix}") from error

    return copied_once(place, name, make, f"{access.data_section}cache_dir")


def _place(folder: Path, url: str, stamp: Sequence[str]) -> tuple[Path, str]:
    """Folder and name of a copy, which has a separate folder and so keeps its name."""
    digest = hashlib.sha256("\n".join([url, *stamp]).encode()).hexdigest()[:32]
    return folder / digest, Path(urlsplit(url).path).name


def _filesystem(url: str, setting: str) -> tuple[Any, str]:
    _check_protocol(url, setting)
    try:
        with named(partial(_unreadable, url, setting)):
            filesystem, path = fsspec.core.url_to_fs(url)
    except DataError as error:
        if not isinstance(error.__cause__, ImportError):
            raise
        extra = _EXTRAS[url.partition("://")[0]]
        assert extra is not None, "files need no package"
        raise MissingExtraError(
            f"{setting}: {url} needs a package that is not installed ({first_line(error.__cause__)}); "
            f"{pip_install(extra)}"
        ) from error
    return filesystem, str(path)


def _check_protocol(url: str, setting: str) -> None:
    """DataError for a chained or templated URL, or one with a protocol that is not supported."""
    if is_web(url):
        return
    if _CHAIN_OR_TEMPLATE.search(url):
        raise DataError(
            f"{setting}: {url} is a chain or a template of URLs (:: or {{{{), which can lead anywhere; write the URL "
            "of one file"
        )
    if url.partition("://")[0] not in _EXTRAS:
        raise DataError(
            f"{setting}: {url} has a protocol that is not supported; give a path, or a URL at http(s)://, s3://, gs:// "
            "or hf://, or download the file"
        )


def _unreadable(url: str, setting: str, error: Exception) -> DataError:
    return DataError(
        f"{setting}: {url} cannot be read ({type(error).__name__}: {first_line(error)}); correct the address or the "
        "credentials, or download the file and name the copy"
    )
