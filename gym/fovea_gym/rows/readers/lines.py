"""JSONL, JSON and CSV files, mapped into memory with an index of their rows; a row is parsed on access.

The index takes 24 bytes per row. A broken row is a bad row and does not affect the others.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
import mmap
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from fovea_gym.errors import BadRowError, DataError
from fovea_gym.rows.readers.base import first_line, listed

RowBytes: TypeAlias = tuple[int, int, int]
"""The first byte of a row, the first byte after it, and the line on which it begins, from 1; 0 for no line."""
Parse: TypeAlias = Callable[[bytes], dict[str, object]]

_BOM = codecs.BOM_UTF8
_HEAD_BYTES = 4096
_HEADER_ROWS = 100
# strings are passed over as a whole, so that brackets inside them do not count; possessive: no way back, no stack
_JSON_MARKS = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{}]', re.DOTALL)
_CR_ONLY = r"lines end in CR only, not in LF or CR LF; convert them: tr '\r' '\n' < FILE > NEW"
# csv's own limit of 128 KiB is less than an image in base64
_MAX_CELL_BYTES = 1 << 28


class ByteRangeTable:
    """The rows of one file, as byte ranges that are parsed on access."""

    def __init__(self, path: Path, ranges: Iterable[RowBytes], parse: Parse, columns: Sequence[str] = ()) -> None:
        self.name, self.folder, self.key = path.name, str(path.parent), str(path.resolve())
        self._bytes = _mapped(path)
        self._ranges = np.fromiter((offset for each in ranges for offset in each), dtype=np.int64).reshape(-1, 3)
        self._parse = parse
        self.columns: Sequence[str] = columns or self._keys_of_first_rows()

    def __len__(self) -> int:
        return len(self._ranges)

    def row(self, index: int) -> dict[str, object]:
        start, end, _ = self._ranges[index]
        try:
            return self._parse(self._bytes[start:end])
        # UnicodeDecodeError and JSONDecodeError are ValueErrors
        except (ValueError, RecursionError, csv.Error) as error:
            raise BadRowError(
                f"{self.name} {self.place(index)}: cannot be read ({first_line(error)})", "row_unreadable", "correct it"
            ) from error

    def place(self, index: int) -> str:
        line = self._ranges[index][2]
        return f"line {line}" if line else f"row {index}"

    def column(self, name: str) -> Iterable[object]:
        for index in range(len(self)):
            try:
                yield self.row(index).get(name)
            except BadRowError:
                yield None

    def _keys_of_first_rows(self) -> list[str]:
        """The columns of a file without a header: all keys of its first rows, since a single row may lack some."""
        keys: dict[str, None] = {}
        for index in range(min(len(self), _HEADER_ROWS)):
            try:
                keys |= dict.fromkeys(self.row(index))
            except BadRowError:
                continue
        return list(keys)


def json_lines(path: Path, setting: str) -> ByteRangeTable:
    """Open a file of one JSON object per line; empty lines are not rows."""
    _check_utf8(path, setting)
    content = _mapped(path)
    table = ByteRangeTable(path, _line_ranges(content), _json_object)
    if not table.columns and content[:_HEAD_BYTES].removeprefix(_BOM).lstrip().startswith(b"["):
        raise DataError(f"{setting}: {path} is a JSON list; name it {path.stem}.json, or write one object a line")
    return _with_columns(table, path, setting)


def json_array(path: Path, setting: str) -> ByteRangeTable:
    """Open a JSON list of objects; a file that begins with an object is read as JSON lines."""
    _check_utf8(path, setting)
    content = _mapped(path)
    if content[: 1 << 16].removeprefix(_BOM).lstrip()[:1] != b"[":
        return json_lines(path, setting)
    return _with_columns(ByteRangeTable(path, _object_ranges(content, path, setting), _json_object), path, setting)


def _with_columns(table: ByteRangeTable, path: Path, setting: str) -> ByteRangeTable:
    """The table; DataError, with the fault of the first row, where none of those that name the columns can be read."""
    if len(table) and not table.columns:
        reason = "an object without columns"
        try:
            table.row(0)
        except BadRowError as error:
            cause = error.__cause__
            reason = first_line(cause if isinstance(cause, Exception) else error)
        rows = "rows" if len(table) <= _HEADER_ROWS else f"first {_HEADER_ROWS} rows"
        raise DataError(
            f"{setting}: {path}: none of its {rows} can be read ({table.place(0)}: {reason}); write each row as an "
            "object of columns and values"
        )
    return table


def csv_rows(path: Path, setting: str) -> ByteRangeTable:
    """Open a comma-separated file (*.tsv: tab-separated) with a header line; cells are strings, empty ones None."""
    _check_utf8(path, setting)
    delimiter = "\t" if path.suffix == ".tsv" else ","
    ranges = _csv_ranges(path, delimiter, setting)
    start, end, _ = next(ranges, (0, 0, 1))
    try:
        names = _csv_cells(_mapped(path)[start:end], delimiter)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"{setting}: the header of {path} cannot be read ({first_line(error)}); save the file as UTF-8"
        ) from error

    def parse(content: bytes) -> dict[str, object]:
        cells = _csv_cells(content, delimiter)
        if len(cells) != len(names):
            raise ValueError(f"{len(cells)} cells for {len(names)} columns")
        return {name: cell if cell != "" else None for name, cell in zip(names, cells, strict=True)}

    return ByteRangeTable(path, ranges, parse, names)


def _check_utf8(path: Path, setting: str) -> None:
    """Raise DataError for text in UTF-16 or UTF-32, which Windows writes: it holds NULs, or a mark that says so."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in head:
        raise DataError(
            f"{setting}: {path} is text in UTF-16, or none at all, and UTF-8 is read; save it as UTF-8 (Excel: CSV "
            f"UTF-8), or convert it: iconv -f UTF-16 -t UTF-8 {path.name}"
        )


def _mapped(path: Path) -> mmap.mmap | bytes:
    if not path.stat().st_size:
        return b""  # which cannot be mapped
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _line_ranges(content: mmap.mmap | bytes) -> Iterator[RowBytes]:
    start = len(_BOM) if content[: len(_BOM)] == _BOM else 0
    for line in itertools.count(1):
        if start >= len(content):
            return
        end = content.find(b"\n", start)
        end = len(content) if end < 0 else end
        if content[start:end].strip():
            yield start, end, line
        start = end + 1


def _object_ranges(content: mmap.mmap | bytes, path: Path, setting: str) -> Iterator[RowBytes]:
    """The elements of the outermost list; anything else than a comma between them is a row as well, a bad one."""
    depth = start = end = 0
    for mark in _JSON_MARKS.finditer(content):
        sign = mark[0][:1]
        if sign == b'"':
            continue
        if depth == 1:
            if content[end : mark.start()].strip(b" \t\r\n,"):
                yield end, mark.start(), 0
            start = mark.start()
        depth += 1 if sign in b"[{" else -1
        if depth == 1:
            if sign in b"]}":
                yield start, mark.end(), 0
            end = mark.end()
    if depth:
        raise DataError(
            f"{setting}: {path} is a JSON list that does not end, so the file is damaged; copy or write it again"
        )


def _json_object(content: bytes) -> dict[str, object]:
    try:
        row = json.loads(content, object_pairs_hook=_no_key_twice)
    except json.JSONDecodeError:
        if b"\r" in content.strip() and b"\n" not in content:
            raise ValueError(_CR_ONLY) from None
        raise
    except ValueError as error:  # of an integer of 5,000 digits; the rest is advice for programmers
        raise ValueError(str(error).partition("; use sys.")[0]) from None
    if not isinstance(row, dict):
        raise ValueError(f"a JSON {type(row).__name__}, not an object of columns and values")
    return row


def _no_key_twice(pairs: list[tuple[str, object]]) -> dict[str, object]:
    cells = dict(pairs)
    if len(cells) < len(pairs):
        repeated = [repr(key) for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        raise ValueError(f"an object has several values for {listed(repeated)}")
    return cells


def _csv_ranges(path: Path, delimiter: str, setting: str) -> Iterator[RowBytes]:
    """The records of a CSV file; a record spans several lines while a quote is open."""
    csv.field_size_limit(_MAX_CELL_BYTES)
    with path.open("rb") as file:
        start = end = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
        file.seek(start)

        def lines() -> Iterator[str]:
            nonlocal end
            for line in file:
                end += len(line)
                yield line.decode("latin-1")  # one character per byte; the cells are decoded by their reader

        records = csv.reader(lines(), delimiter=delimiter)
        last, line = slice(start, end), 1
        try:
            for record in records:
                if record:
                    last = slice(start, end)
                    yield start, end, line
                start, line = end, records.line_num + 1
            _check_quotes_end(_mapped(path)[last], delimiter)
        except csv.Error as error:
            reason = _CR_ONLY if "new-line character" in str(error) else first_line(error)
            raise DataError(
                f"{setting}: {path} is not a CSV file that can be read ({reason}); write it again, for "
                "example with pandas: frame.to_csv(path, index=False)"
            ) from error


def _check_quotes_end(last: bytes, delimiter: str) -> None:
    """Raise csv.Error for a quote that is never closed, which makes one row of the rest of the file."""
    try:
        list(csv.reader(io.StringIO(last.decode("latin-1"), newline=""), delimiter=delimiter, strict=True))
    except csv.Error as error:
        if "unexpected end of data" in str(error):
            raise


def _csv_cells(content: bytes, delimiter: str) -> list[str]:
    return next(csv.reader(io.StringIO(content.decode("utf-8"), newline=""), delimiter=delimiter, strict=True), [])
