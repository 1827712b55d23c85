"""Parquet files, decoded on access and one row group at a time."""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from fovea_gym.errors import BadRowError, DataError
from fovea_gym.rows.access import RowAccess
from fovea_gym.rows.readers.base import copied_once, first_line

# Rows are drawn in random order: a row costs its whole group unless that is still in memory.
# pandas writes up to a million rows into one group, which may be all of a data set with its images.
MAX_GROUP_BYTES = 1 << 26
COPIED_GROUP_BYTES = 1 << 22
_COLUMN_ROWS = 1 << 16
"""Rows of one column that are decoded at a time."""
_COPIED_ROWS = 256
"""Most rows that a copy, or a column of lists such as images, decodes at a time: nothing tells how long texts are that
a file holds once."""
PREFIXES = "DELTA_BYTE_ARRAY"
"""Encoding of texts by the prefix that they share with the one before."""
_VALUE_BYTES = 8
"""Width of a decoded number, and more than that of a text's place in its dictionary."""


class ParquetTable:
    """The rows of one Parquet file; DataError, naming `setting`, where it cannot be read.

    A file with large row groups is copied into the access's folder of copies once, in small ones.
    """

    def __init__(self, path: Path, *, setting: str, access: RowAccess) -> None:
        self.name, self.folder = path.name, str(path.parent)
        self.key = str(path.resolve())
        self._path, self._setting = path, setting
        self._file = _open(path, setting)
        if _largest_group(self._file) > MAX_GROUP_BYTES or _shares_prefixes(self._file.metadata):
            stamp = hashlib.sha256(f"{self.key} {path.stat()}".encode()).hexdigest()[:32]
            copy, named = f"{stamp}.parquet", f"{access.data_section}cache_dir"
            self._path = copied_once(access.copies, copy, self._copy_in_small_groups, named)
            self._file = _open(self._path, setting, keep_equal_texts=False)
        self.columns: Sequence[str] = self._file.schema_arrow.names
        sizes = (self._file.metadata.row_group(index).num_rows for index in range(self._file.num_row_groups))
        self._ends = list(itertools.accumulate(sizes))
        self._cache = access.cache

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, index: int) -> dict[str, object]:
        group = bisect.bisect_right(self._ends, index)
        first = self._ends[group - 1] if group else 0
        table = self._cache.get((self.key, group), lambda: self._read(group, first))
        try:
            row: dict[str, object] = table.slice(index - first, 1).to_pylist()[0]
        except (pa.ArrowException, ValueError, OverflowError) as error:
            problem = f"{self.name} row {index}: a value cannot be read ({first_line(error)})"
            raise BadRowError(problem, "row_unreadable", "correct it") from error
        return row

    def place(self, index: int) -> str:
        return f"row {index}"

    def column(self, name: str) -> Iterable[object]:
        nested = pa.types.is_nested(self._file.schema_arrow.field(name).type)
        for batch in self._batches(_COPIED_ROWS if nested else _COLUMN_ROWS, [name]):
            # one after the other: equal values are kept once until then
            yield from (value.as_py() for value in batch.column(0))

    def _read(self, group: int, first: int) -> pa.Table:
        try:
            try:
                return self._file.read_row_group(group, use_threads=False)
            except pa.ArrowNotImplementedError:
                self._reopen_plain()
                return self._file.read_row_group(group, use_threads=False)
        except MemoryError as error:
            raise _too_large(self.name) from error
        except (pa.ArrowException, OSError) as error:
            raise BadRowError(
                f"{self.name} rows {first} to {self._ends[group] - 1} cannot be decoded "
                f"({first_line(error)}), so the file is damaged",
                "row_unreadable",
                "copy or write it again",
            ) from error

    def _copy_in_small_groups(self, into: Path) -> None:
        metadata = self._file.metadata
        num_bytes = sum(_decoded_bytes(metadata, index) for index in range(metadata.num_row_groups))
        num_rows = min(_COPIED_ROWS, max(1, metadata.num_rows * COPIED_GROUP_BYTES // max(num_bytes, 1)))
        self._file = _open(self._path, self._setting, keep_equal_texts=False)
        with pq.ParquetWriter(into, self._file.schema_arrow) as writer:
            group: list[pa.RecordBatch] = []
            for batch in self._batches(num_rows):
                group.append(batch)
                if sum(each.nbytes for each in group) >= COPIED_GROUP_BYTES:
                    writer.write_table(pa.Table.from_batches(group))
                    group = []
            if group:
                writer.write_table(pa.Table.from_batches(group))

    def _reopen_plain(self) -> None:
        """Read equal texts one by one: Arrow keeps none in a list or struct where the file gives its dictionary up."""
        self._file = _open(self._path, self._setting, keep_equal_texts=False)

    def _batches(self, num_rows: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        num_read = 0
        try:
            try:
                for batch in self._file.iter_batches(batch_size=num_rows, columns=columns, use_threads=False):
                    yield batch
                    num_read += len(batch)
            except pa.ArrowNotImplementedError:
                self._reopen_plain()
                for batch in self._file.iter_batches(batch_size=num_rows, columns=columns, use_threads=False):
                    yield batch[min(num_read, len(batch)) :]
                    num_read = max(0, num_read - len(batch))
        except MemoryError as error:
            raise _too_large(self.name) from error
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{self.name} cannot be decoded ({first_line(error)}), so the file is damaged; copy or write it again"
            ) from error


def _largest_group(file: pq.ParquetFile) -> int:
    return max((_decoded_bytes(file.metadata, index) for index in range(file.num_row_groups)), default=0)


def _decoded_bytes(metadata: pq.FileMetaData, group: int) -> int:
    """Estimated memory of a row group: its encoded values, of which texts stay as they are, and one value per entry."""
    row_group = metadata.row_group(group)
    columns = (row_group.column(index) for index in range(metadata.num_columns))
    widths = (metadata.schema.column(index).length or _VALUE_BYTES for index in range(metadata.num_columns))
    values = sum(column.num_values * width for column, width in zip(columns, widths, strict=True))
    return int(row_group.total_byte_size + values)


def _shares_prefixes(metadata: pq.FileMetaData) -> bool:
    """True if texts are stored as differences from the one before, which tell nothing of their length."""
    return any(PREFIXES in column.encodings for column in _columns(metadata))


def _columns(metadata: pq.FileMetaData) -> Iterator[pq.ColumnChunkMetaData]:
    for group, index in itertools.product(range(metadata.num_row_groups), range(metadata.num_columns)):
        yield metadata.row_group(group).column(index)


def _texts(metadata: pq.FileMetaData) -> list[str]:
    """Columns of texts or bytes with a dictionary, which stays one: a small file may hold a long text in every row."""
    of_bytes = (column for column in _columns(metadata) if column.physical_type == "BYTE_ARRAY")
    # Arrow makes no dictionary of prefixes
    named = {each.path_in_schema for each in of_bytes if each.has_dictionary_page and PREFIXES not in each.encodings}
    return sorted(named)


def _too_large(name: str) -> DataError:
    return DataError(
        f"{name} has values that do not fit into memory; free some, or write the file again in smaller row groups, for "
        "example with pandas: frame.to_parquet(path, row_group_size=1000)"
    )


def _open(path: Path, setting: str, *, keep_equal_texts: bool = True) -> pq.ParquetFile:
    """A Parquet file; with `keep_equal_texts` a text that comes again takes no more memory."""
    try:
        texts = _texts(pq.read_metadata(path, memory_map=True)) if keep_equal_texts else None
        return pq.ParquetFile(path, memory_map=True, pre_buffer=False, read_dictionary=texts)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{setting}: {path} is not a Parquet file that can be read ({first_line(error)}); "
            "write it again, for example with pandas: frame.to_parquet(path)"
        ) from error
