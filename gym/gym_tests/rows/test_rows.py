"""Rows of files: the values as written, where they stand, Parquet within bounded memory, and parts of data sets."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fovea_gym.errors import BadRowError, DataError, MissingExtraError
from fovea_gym.rows import access
from fovea_gym.rows.access import GroupCache, RowAccess
from fovea_gym.rows.rows import image_refs, open_rows
from fovea_gym.utils.installing import pip_install
from gym_tests.rows.three_rows import ROWS, as_csv, opened
from gym_tests.tables import table


def written(path: Path, num_rows: int, *, first: int = 0, rows_per_group: int = 4) -> str:
    numbers = list(range(first, first + num_rows))
    table = pa.table({"n": numbers, "images": [[{"bytes": bytes([n]), "path": None}] for n in numbers]})
    pq.write_table(table, path, row_group_size=rows_per_group)
    return str(path)


def test_rows_of_several_files_in_order(tmp_path: Path) -> None:
    files = [written(tmp_path / "a.parquet", 10), written(tmp_path / "b.parquet", 3, first=10)]
    rows = open_rows(files)
    assert [row["n"] for row in rows] == list(range(len(rows))) == list(range(13))
    assert rows[11] == {"n": 11, "images": [{"bytes": b"\x0b", "path": None}]}
    assert [rows[-1]["n"], *(row["n"] for row in rows[8:12])] == [12, 8, 9, 10, 11]
    with pytest.raises(IndexError):
        rows[13]


def test_where_a_row_stands(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    files = [written(tmp_path / "a.parquet", 10), written(tmp_path / "more" / "b.parquet", 6)]
    rows = open_rows(files)
    assert [rows.where(n) for n in (0, 9, 15)] == ["a.parquet row 0", "a.parquet row 9", "b.parquet row 5"]
    assert [rows.folder(n) for n in (9, 10)] == [str(tmp_path), str(tmp_path / "more")]
    assert rows.key(15) == f"{tmp_path}/more/b.parquet row 5"


def test_few_row_groups_are_kept(tmp_path: Path) -> None:
    """The bound holds for all files together."""
    files = [written(tmp_path / "a.parquet", 40), written(tmp_path / "b.parquet", 40, first=40)]
    cache = GroupCache(3 * pq.read_table(tmp_path / "a.parquet").nbytes // 10)
    rows = open_rows(files, access=RowAccess(cache=cache))
    assert [rows[n]["n"] for n in reversed(range(80))] == list(reversed(range(80)))
    assert 1 <= len(cache._tables) <= 4


def test_images_of_a_row(tmp_path: Path) -> None:
    structs = [{"bytes": b"two", "path": "x.png"}, {"bytes": None, "path": "three.png"}]
    refs = image_refs(b"one", None, structs, str(tmp_path / "four.png"), where="a.parquet row 2", folder=tmp_path)
    assert [ref.source for ref in refs] == [b"one", b"two", str(tmp_path / "three.png"), str(tmp_path / "four.png")]
    assert [ref.where for ref in refs] == [f"a.parquet row 2, image {n}" for n in (1, 2, 3, 4)]
    assert image_refs(None, where="w", folder=tmp_path) == ()
    (url,) = image_refs("https://a.org/b.png", where="w", folder=tmp_path)
    assert url.source == "https://a.org/b.png"


@table("path", ["file:///etc/passwd", "hf://datasets/a/b.png"])
def test_a_protocol_that_is_not_read_is_said_of_rows_from_python(path: str) -> None:
    problem = rf"^row 2, image 1: {path} has a protocol that is not supported; give a path"
    with pytest.raises(BadRowError, match=problem) as error:
        image_refs(path, where="row 2", folder=None)
    assert error.value.reason == "image_outside_folder"


def test_a_text_that_is_almost_base64_is_decided_in_linear_time(tmp_path: Path) -> None:
    """In quadratic time a MiB takes two hours."""
    text = "A" * 80 + " " * (1 << 20)
    problem = r"of 1048657 characters, A{40}[.]{3}, is not an image and too long for a path"
    with pytest.raises(BadRowError, match=problem):
        image_refs(f"{text}!", where="w", folder=tmp_path)
    for end in ("AA", "A=", "==", "==\n ", "AA \n "):
        (ref,) = image_refs("A" * 82 + end, where="w", folder=tmp_path)
        assert isinstance(ref.source, bytes)


def error_of(files: list[str], columns: tuple[tuple[str, str], ...] = ()) -> str:
    with pytest.raises(DataError) as error:
        open_rows(files, columns=columns)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_no_such_file(tmp_path: Path) -> None:
    written(tmp_path / "train.parquet", 1)
    path = tmp_path / "trian.parquet"
    assert error_of([str(path)]) == f"sources: no such file {path}; did you mean train.parquet?"
    for other in (".ci", "notes.md"):
        (tmp_path / other).touch()
    assert "(the folder holds train.parquet)" in error_of([str(tmp_path / "0000")])
    assert "does not exist; correct the path" in error_of([str(tmp_path / "no" / "a.parquet")])
    assert "is empty" in error_of([])


def test_not_a_parquet_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_text('{"problem": "x"}\n' * 3)
    message = error_of([str(path)])
    assert f"sources: {path} is not a Parquet file that can be read" in message
    assert message.endswith("write it again, for example with pandas: frame.to_parquet(path)")
    path.write_bytes(b"")
    assert "is not a Parquet file" in error_of([str(path)])


def test_no_rows_and_no_such_column(tmp_path: Path) -> None:
    assert "holds no rows; name a file with rows" in error_of([written(tmp_path / "a.parquet", 0)])
    file = written(tmp_path / "a.parquet", 1)
    assert error_of([file], (("image_keys", "image"),)) == (
        "image_keys: a.parquet has no column 'image'; its columns are n, images; set image_keys=images"
    )
    assert error_of([file], (("prompt_key", "problem"),)).endswith("set prompt_key to one of them")


def test_damaged_row_group(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"{n} " * 50 for n in range(100)]})
    pq.write_table(table, path, compression="zstd", use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[40:400] = bytes(360)
    path.write_bytes(bytes(content))
    rows = open_rows([str(path)])
    with pytest.raises(DataError, match=r"a.parquet rows 0 to 99 cannot be decoded .* copy or write it again"):
        rows[3]
    with pytest.raises(DataError, match=r"a.parquet cannot be decoded .* copy or write it again"):
        list(rows.column("text"))


def test_a_split_that_a_folder_lacks_is_told_without_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.delitem(sys.modules, "fovea_gym.rows.readers.hub", raising=False)
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "metadata.csv").write_text("file_name,label\na.png,red\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"no split 'val'; its splits are test, train; write .*@test"):
        open_rows([f"{tmp_path}@val"])
    with pytest.raises(MissingExtraError, match=re.escape(pip_install("hub"))):
        open_rows([str(tmp_path)])


CONSTANT = "x" * 100_000


@pytest.mark.parametrize("rows", [10_000, 200_000])
def test_equal_texts_of_a_small_file_are_kept_once(rows: int, tmp_path: Path) -> None:
    """A text of 100 kB in every row: by itself, in a list and in a struct."""
    text = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([CONSTANT]))
    in_list = pa.ListArray.from_arrays(pa.array(range(rows + 1), pa.int32()), text)
    columns = {"text": text, "list": in_list, "struct": pa.StructArray.from_arrays([text], ["bytes"])}
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns), file, store_schema=False)
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
    one = datasets.load_dataset("csv", data_files=str(tmp_path / "one.csv"), split=f"train{bounds}")
    assert len(opened(f"{tmp_path}/one.csv@{bounds}", tmp_path)) == len(one)


def test_rows_of_a_part_keep_their_names(tmp_path: Path) -> None:
    """So that a bad row is the same row in every part that holds it."""
    whole = opened(as_csv(tmp_path), tmp_path)
    part = opened(f"{tmp_path}/r.csv@[1:]", tmp_path)
    assert (part.where(0), part.key(0)) == (whole.where(1), whole.key(1))
    for bounds, problem in (("1", "is not a part of a split; write"), ("5:3", "leaves none of 3 rows")):
        with pytest.raises(DataError, match=problem):
            opened(f"{tmp_path}/r.csv@[{bounds}]", tmp_path)
