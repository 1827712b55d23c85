"""Rows of files: the values as written, where they stand, and one line for what is wrong with a file."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fovea_gym.errors import BadRowError, DataError, MissingExtraError
from fovea_gym.rows.access import GroupCache, RowAccess
from fovea_gym.rows.rows import image_refs, open_rows
from fovea_gym.utils.installing import pip_install


def written(path: Path, num_rows: int, *, first: int = 0, rows_per_group: int = 4) -> str:
    numbers = list(range(first, first + num_rows))
    table = pa.table({"n": numbers, "images": [[{"bytes": bytes([n]), "path": None}] for n in numbers]})
    pq.write_table(table, path, row_group_size=rows_per_group)
    return str(path)


def test_rows_of_several_files_in_order(tmp_path: Path) -> None:
    files = [written(tmp_path / "a.parquet", 10), written(tmp_path / "b.parquet", 3, first=10)]
    rows = open_rows(files)
    assert len(rows) == 13
    assert [row["n"] for row in rows] == list(range(13))
    assert rows[11] == {"n": 11, "images": [{"bytes": b"\x0b", "path": None}]}
    assert rows[-1]["n"] == 12
    assert [row["n"] for row in rows[8:12]] == [8, 9, 10, 11]
    with pytest.raises(IndexError):
        rows[13]


def test_where_a_row_stands(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    files = [written(tmp_path / "a.parquet", 10), written(tmp_path / "more" / "b.parquet", 6)]
    rows = open_rows(files)
    assert rows.where(0) == "a.parquet row 0"
    assert rows.where(9) == "a.parquet row 9"
    assert rows.where(15) == "b.parquet row 5"
    assert rows.folder(9) == str(tmp_path)
    assert rows.folder(10) == str(tmp_path / "more")
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


@pytest.mark.parametrize("path", ["file:///etc/passwd", "hf://datasets/a/b.png"])
def test_a_protocol_that_is_not_read_is_said_of_rows_from_python(path: str) -> None:
    with pytest.raises(
        BadRowError, match=rf"^row 2, image 1: {path} has a protocol that is not supported; give a path"
    ) as error:
        image_refs(path, where="row 2", folder=None)
    assert error.value.reason == "image_outside_folder"


def test_a_text_that_is_almost_base64_is_decided_in_linear_time(tmp_path: Path) -> None:
    """In quadratic time a MiB takes two hours."""
    text = "A" * 80 + " " * (1 << 20)
    with pytest.raises(
        BadRowError, match=r"of 1048657 characters, A{40}[.]{3}, is not an image and too long for a path"
    ):
        image_refs(f"{text}!", where="w", folder=tmp_path)


@pytest.mark.parametrize("end", ["AA", "A=", "==", "==\n ", "AA \n "])
def test_base64_is_an_image_whatever_it_ends_in(end: str, tmp_path: Path) -> None:
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


def test_no_rows(tmp_path: Path) -> None:
    assert "holds no rows; name a file with rows" in error_of([written(tmp_path / "a.parquet", 0)])


def test_no_such_column(tmp_path: Path) -> None:
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
