"""Parquet files that hold much in little, within bounded memory, and names of parts of data sets."""

from __future__ import annotations

from pathlib import Path

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fovea_gym.errors import BadRowError, DataError
from fovea_gym.rows import access
from gym_tests.rows.three_rows import ROWS, as_csv, opened

CONSTANT = "x" * 100_000


def columns_of_one_text(rows: int) -> dict[str, object]:
    """A text of 100 kB in every row: by itself, in a list and in a struct."""
    text = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([CONSTANT]))
    in_list = pa.ListArray.from_arrays(pa.array(range(rows + 1), pa.int32()), text)
    return {"text": text, "list": in_list, "struct": pa.StructArray.from_arrays([text], ["bytes"])}


@pytest.mark.parametrize("rows", [10_000, 200_000])
def test_equal_texts_of_a_small_file_are_kept_once(rows: int, tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns_of_one_text(rows)), file, store_schema=False)
    assert file.stat().st_size < 1 << 20
    cache = access.GroupCache()
    before = pa.total_allocated_bytes()
    opened_rows = opened(str(file), tmp_path, cache=cache)
    row = opened_rows[rows - 1]
    assert row == {"text": CONSTANT, "list": [CONSTANT], "struct": {"bytes": CONSTANT}}
    assert max(cache.num_bytes, pa.total_allocated_bytes() - before) < 1 << 25
    assert next(iter(opened_rows.column("list"))) == [CONSTANT]


def test_texts_that_share_a_prefix_are_decoded_a_few_at_a_time(tmp_path: Path) -> None:
    file, rows = tmp_path / "a.parquet", 1500
    table = pa.table({"text": pa.array([CONSTANT]).take(pa.array([0] * rows))})
    pq.write_table(table, file, use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"})
    del table
    cache = access.GroupCache()
    assert opened(str(file), tmp_path, cache=cache)[rows - 1] == {"text": CONSTANT}
    assert cache.num_bytes < 1 << 25


def test_too_little_memory_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "r.parquet")
    rows = opened(str(tmp_path / "r.parquet"), tmp_path)

    def out_of_memory(*_: object, **__: object) -> None:
        raise pa.ArrowMemoryError("malloc of size 100 failed")

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", out_of_memory)
    with pytest.raises(DataError, match=r"r\.parquet has values that do not fit into memory") as error:
        rows[0]
    assert not isinstance(error.value, BadRowError)


def test_pictures_whose_dictionary_is_given_up_midway_are_read(tmp_path: Path) -> None:
    """As those of Geometry3K are: the first ones are in a dictionary, which is full at some row."""
    pictures = [[{"bytes": bytes([number % 251]) * 5_000, "path": None}] for number in range(500)]
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"images": pictures}), file)
    rows = opened(str(file), tmp_path)
    assert list(rows.column("images")) == pictures
    assert [rows[number]["images"] for number in (0, 210, 499)] == [pictures[number] for number in (0, 210, 499)]
    assert [opened(str(file), tmp_path)[499]["images"]] == pictures[499:]


@pytest.mark.parametrize("bounds", ["[:90%]", "[90%:]", "[3:7]", "[-2:]", "[:-10%]", "[33%:66%]", "[:]"])
def test_parts_of_splits_are_those_of_datasets(bounds: str, tmp_path: Path) -> None:
    """Against datasets' own reading of `split=`, for a data set, several files and a file without splits."""
    (tmp_path / "d").mkdir()
    for part in range(2):
        frame = pd.DataFrame({"n": range(part * 13, part * 13 + 13)})
        frame.to_json(tmp_path / "d" / f"part-{part}.jsonl", orient="records", lines=True)
    expected = datasets.load_dataset("json", data_dir=str(tmp_path / "d"), split=f"train{bounds}")["n"]
    for source in (f"{tmp_path}/d@train{bounds}", f"{tmp_path}/d/part-*.jsonl@{bounds}"):
        rows = opened(source, tmp_path)
        assert [row["n"] for row in rows] == list(rows.column("n")) == list(expected)
    frame.to_csv(tmp_path / "one.csv", index=False)
    assert len(opened(f"{tmp_path}/one.csv@{bounds}", tmp_path)) == len(range(13)[part_slice(bounds)])


def part_slice(bounds: str) -> slice:
    ends = [
        bound and (round(0.13 * int(bound[:-1])) if "%" in bound else int(bound)) for bound in bounds[1:-1].split(":")
    ]
    return slice(*(end if end != "" else None for end in ends))


def test_rows_of_a_part_keep_their_names(tmp_path: Path) -> None:
    """So that a bad row is the same row in every part that holds it."""
    whole = opened(as_csv(tmp_path), tmp_path)
    part = opened(f"{tmp_path}/r.csv@[1:]", tmp_path)
    assert (part.where(0), part.key(0)) == (whole.where(1), whole.key(1))


@pytest.mark.parametrize(
    ("bounds", "problem"), [("1", "is not a part of a split; write"), ("5:3", "leaves none of 3 rows")]
)
def test_a_part_without_rows(bounds: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=problem):
        opened(f"{as_csv(tmp_path)}@[{bounds}]", tmp_path)
