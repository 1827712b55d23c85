"""Every form that rows come in gives the same rows; what is broken is one bad row, or one line about the file."""

from __future__ import annotations

import base64
import importlib.util
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fovea_gym.errors import BadRowError, DataError, MissingExtraError
from fovea_gym.rows import access
from fovea_gym.rows.access import RowAccess, UrlLimits
from fovea_gym.rows.readers import parquet
from fovea_gym.rows.rows import Rows, image_refs, open_rows
from fovea_gym.utils.installing import pip_install
from gym_tests.images import from_array, png
from gym_tests.rows.three_rows import ROWS, as_csv, opened
from gym_tests.rows.web import served
from gym_tests.tables import table

PNG = png(width=3, height=2)


def written(file: Path, text: str) -> str:
    file.write_text(text, encoding="utf-8")
    return str(file)


def as_jsonl(path: Path) -> str:
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    return written(path / "r.jsonl", "\ufeff" + "\n\n".join(lines))


def as_json(path: Path) -> str:
    return written(path / "r.json", json.dumps(ROWS, indent=2))


def as_lines_called_json(path: Path) -> str:
    return written(path / "r.json", "".join(json.dumps(row) + "\r\n" for row in ROWS))


def as_tsv(path: Path) -> str:
    pd.DataFrame(ROWS).to_csv(path / "r.tsv", index=False, sep="\t", lineterminator="\r\n")
    return str(path / "r.tsv")


def as_saved_splits(path: Path) -> str:
    whole = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": whole, "test": whole.select([0])}).save_to_disk(path / "splits")
    return f"{path / 'splits'}@train"


def as_parquet(path: Path, table: pa.Table | None = None) -> str:
    pq.write_table(pa.Table.from_pylist(ROWS) if table is None else table, path / "r.parquet")
    return str(path / "r.parquet")


def as_saved_dataset(path: Path) -> str:
    datasets.Dataset.from_list(ROWS).save_to_disk(path / "saved")
    return str(path / "saved")


@table(
    "form",
    [
        *(as_parquet, as_jsonl, as_json, as_lines_called_json, as_csv, as_tsv),
        pd.DataFrame(ROWS),
        ROWS,
        {name: [row[name] for row in ROWS] for name in ROWS[0]},
        datasets.Dataset.from_list(ROWS),
        *(
            as_saved_dataset,
            as_saved_splits,
            lambda path: Path(as_jsonl(path)),
            lambda path: f"file://{as_jsonl(path)}",
        ),
    ],
)
def test_every_form_gives_the_same_rows(form: object, tmp_path: Path) -> None:
    rows = opened(form(tmp_path) if callable(form) else form, tmp_path)
    assert [dict(row) for row in rows] == ROWS
    assert (rows.columns, list(rows.column("n")), dict(rows[-1])) == (["n", "text", "image"], [*"012"], ROWS[2])
    assert len({rows.key(n) for n in range(3)}) == 3
    assert rows.where(1).endswith((" row 1", " line 2", " line 3"))


@table("make", [as_jsonl, as_lines_called_json, as_csv, as_tsv])
def test_a_row_is_named_by_its_line_in_an_editor(make: Callable[[Path], str], tmp_path: Path) -> None:
    """Lines of a file with a header, empty lines and a row of two lines, as `open` counts them."""
    path = Path(make(tmp_path))
    rows = opened(str(path), tmp_path)
    lines = path.read_text(encoding="utf-8").splitlines()
    for index, text in enumerate(["plain", "with ", "]}[{"]):
        word, number = rows.where(index).split()[-2:]
        assert word == "line"
        assert text in lines[int(number) - 1]


@table(
    ("source", "problem"),
    [
        (7, r"of type int holds no rows that can be read; give a pandas DataFrame, a datasets.Dataset, a list"),
        ((row for row in ROWS), "of type generator holds no rows that can be read"),
        (["a question"], "row 0 is of type str, not a mapping of columns to cells; write it as"),
        ({"n": [1, 2], "text": ["one"]}, "lists of equal length, but are: n 2, text 1; correct them"),
        *(({"n": cell}, "lists of equal length, but are: n no list") for cell in (1, "text", {0: "a"}, {"a", "b"})),
        ([], "holds no rows"),
        (datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}), "with the splits train was given"),
    ],
)
def test_an_object_that_holds_no_rows(source: object, problem: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=problem) as error:
        opened(source, tmp_path)
    assert str(error.value).startswith("sources")
    assert "\n" not in str(error.value)


def test_columns_of_pandas_are_read_by_place(tmp_path: Path) -> None:
    """The labels of a shuffled or filtered frame are those of the rows that it was made from."""
    frame = pd.DataFrame({"question": ["q0", "q1", "q2"], "answer": ["a0", "a1", "a2"]})
    for chosen in (frame.iloc[[2, 0, 1]], frame[frame.question != "q1"]):
        rows = opened({"question": chosen["question"], "answer": chosen["answer"].tolist()}, tmp_path)
        pairs = [(rows[index]["question"], rows[index]["answer"]) for index in range(len(rows))]
        assert pairs == [*zip(chosen["question"], chosen["answer"], strict=True)]


def test_pictures_and_paths_of_ones_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths from the user's own code may lead anywhere, unless `image_root` says where images are."""
    for folder in ("far", "here"):
        (tmp_path / folder).mkdir()
    picture = Image.new("RGB", (4, 4), "red")
    picture.save(tmp_path / "far" / "x.png")
    monkeypatch.chdir(tmp_path / "here")
    cells = [tmp_path / "far" / "x.png", str(tmp_path / "far" / "x.png"), "../far/x.png", picture]
    for source in ([{"image": cell} for cell in cells], pd.DataFrame({"image": cells})):
        rows = opened(source, tmp_path)
        for index in range(len(cells)):
            (ref,) = image_refs(rows[index]["image"], where="w", folder=rows.folder(index))
            assert from_array(ref).getpixel((0, 0)) == (255, 0, 0)
        rooted = opened(source, tmp_path, image_root=str(tmp_path / "far"))
        (ref,) = image_refs("x.png", where="w", folder=rooted.folder(0))
        assert ref.source == str(tmp_path / "far" / "x.png")
        with pytest.raises(BadRowError, match="leads out of"):
            image_refs("../here/x.png", where="w", folder=rooted.folder(0))


@table(
    "make",
    [
        lambda path: written(path / "r.csv", "image,answer,image\na.png,1,b.png\n"),
        lambda path: as_parquet(path, pa.table([[1], [2], [3]], names=["image", "answer", "image"])),
        lambda _path: pd.DataFrame([[1, 2, 3]], columns=["image", "answer", "image"]),
        lambda path: written(path / "metadata.csv", "file_name,answer,image\na.png,1,b.png\n").rpartition("/")[0],
    ],
)
def test_a_column_name_that_comes_twice(make: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"sources: .* has several columns called 'image', of which one"):
        opened(make(tmp_path), tmp_path)


def test_a_key_that_comes_twice_makes_a_bad_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n{"n": 2, "answer": "1", "answer": "2"}\n')
    rows = opened(str(tmp_path / "a.jsonl"), tmp_path)
    assert rows[0] == {"n": 1}
    with pytest.raises(BadRowError, match=r"a.jsonl line 2: cannot be read \(an object has several values for 'answer"):
        rows[1]


@table("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@table("make", [as_csv, as_tsv, as_jsonl, as_json])
def test_text_in_another_encoding_is_one_line(make: Callable[[Path], str], encoding: str, tmp_path: Path) -> None:
    path = Path(make(tmp_path))
    path.write_text(path.read_text(encoding="utf-8-sig"), encoding=encoding)
    with pytest.raises(DataError, match=r"sources: .* is text in UTF-16, .*; save it as UTF-8") as error:
        opened(str(path), tmp_path)
    assert "\n" not in str(error.value)


def test_several_files_patterns_and_a_frame_together(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / f"part-{name}.jsonl").write_text(json.dumps({"n": name}) + "\n")
    access = RowAccess(cache_dir=tmp_path)
    rows = open_rows([str(tmp_path / "part-[ab].jsonl"), pd.DataFrame({"n": ["frame"]})], access=access)
    assert [row["n"] for row in rows] == ["a", "b", "frame"]
    with pytest.raises(DataError, match=r"no file matches .*none-\*.jsonl; correct the pattern"):
        open_rows([str(tmp_path / "none-*.jsonl")], access=access)
    rows = opened(f"file://{tmp_path}/part-[ab].jsonl", tmp_path)
    assert [row["n"] for row in rows] == ["a", "b"]
    assert rows.where(1) == "part-b.jsonl line 1"


def bad_rows(rows: Rows) -> dict[int, str]:
    errors = {}
    for index in range(len(rows)):
        try:
            rows[index]
        except BadRowError as error:
            errors[index] = f"{error.reason}: {error}"
    return errors


def test_a_broken_row_breaks_no_other(tmp_path: Path) -> None:
    lines = ['{"n": 1}', '{"n": ', "[1]", "[" * 100_000, '{"n": "\udcff"}', '{"n": 2}']
    (tmp_path / "a.jsonl").write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
    rows = opened(str(tmp_path / "a.jsonl"), tmp_path)
    assert list(bad_rows(rows)) == [1, 2, 3, 4]
    assert all(error.startswith("row_unreadable: ") for error in bad_rows(rows).values())
    assert "a.jsonl line 3: cannot be read (a JSON list, not an object" in bad_rows(rows)[2]
    (tmp_path / "d.jsonl").write_text('{"n": 1}\n{"n": 2}\r{"n": 3}\r\n')
    assert "line 2: cannot be read (lines end in CR only" in bad_rows(opened(str(tmp_path / "d.jsonl"), tmp_path))[1]
    (tmp_path / "b.json").write_text('[{"n": 1}, "text", {"n": 2}, {"n": 3,}, 7, [8], {"n": [{"x": "]"}]}]')
    rows = opened(str(tmp_path / "b.json"), tmp_path)
    assert list(bad_rows(rows)) == [1, 3, 4, 5]
    assert [rows[n] for n in (0, 2, 6)] == [{"n": 1}, {"n": 2}, {"n": [{"x": "]"}]}]
    (tmp_path / "c.csv").write_bytes(b"a,b\n1,2\n3\n4,5,6\n\xff,8\n9,\n")
    rows = opened(str(tmp_path / "c.csv"), tmp_path)
    assert list(bad_rows(rows)) == [1, 2, 3]
    assert rows[4] == {"a": "9", "b": None}


@table(
    ("name", "content", "problem"),
    [
        ("a.json", '[{"n": 1}, {"n": 2}', "is a JSON list that does not end"),
        ("a.csv", 'a,b\n1,2\n"3,4\n5,6\n', "not a CSV file that can be read"),
        ("a.csv", "a,b\n", "a.csv holds no rows"),
        *(("a.jsonl", content, "a.jsonl holds no rows") for content in ("\n\n", "")),
        ("a.txt", "x", "is not one of .parquet, .jsonl"),
        ("a.csv", "größe,answer\n1,2\n", r"the header of .*a.csv cannot be read .*; save the file as UTF-8"),
        ("a.jsonl", '[{"a": 1}, {"a": 2}]', r"a\.jsonl is a JSON list; name it a\.json, or write one object a"),
        (
            "a.jsonl",
            '[\n  {\n    "a": 1\n  },\n  {\n    "a": 2\n  }\n]',
            r"a\.jsonl is a JSON list; name it a\.json, or",
        ),
        ("a.jsonl", '{"n": 1, "n": 2}\n{"n": 3, "n": 4}\n', r"none of its rows .* has several values for 'n'\); write"),
        ("a.jsonl", '{"n": 1}\r{"n": 2}\r', r"\(line 1: lines end in CR only, .*: tr '.r' '.n' < FILE > NEW\)"),
        ("a.csv", "a,b\r1,2\r3,4\r", r"not a CSV .* \(lines end in CR only, .*: tr '.r' '.n' < FILE > NEW\)"),
        ("a.json", f'[{{"n": {"1" * 5000}}}]', r"\(row 0: Exceeds the limit .* value has 5000 digits\); write each"),
        ("a.jsonl", "no\n" * 101, r"none of its first 100 rows can be read \(line 1: Expecting value"),
        ("a.jsonl", "{}\n{}\n", r"none of its rows can be read \(line 1: an object without columns\)"),
    ],
)
def test_files_that_are_no_table(name: str, content: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises(DataError, match=problem) as error:
        opened(str(tmp_path / name), tmp_path)
    assert "\n" not in str(error.value)


@table("ending", ["frame", "parquet", "csv", "jsonl"])
def test_shuffled_rows_keep_their_cells_beside_an_index_column(ending: str, tmp_path: Path) -> None:
    """pandas keeps the old numbers of rows that were shuffled as the index, and writes them as a column."""
    order = [4, 0, 3, 1, 2]
    frame = pd.DataFrame({"image": [f"{n}.png" for n in range(5)], "answer": list("abcde")}).iloc[order]
    source: Any = {
        "frame": lambda: frame,
        "parquet": lambda: frame.to_parquet(tmp_path / "r.parquet"),
        "csv": lambda: frame.to_csv(tmp_path / "r.csv"),
        "jsonl": lambda: frame.reset_index().to_json(tmp_path / "r.jsonl", orient="records", lines=True),
    }[ending]()
    rows = opened(source if ending == "frame" else str(tmp_path / f"r.{ending}"), tmp_path)
    assert [(row["image"], row["answer"]) for row in rows] == [(f"{n}.png", "abcde"[n]) for n in order]
    assert list(rows.column("answer")) == ["abcde"[n] for n in order]


def test_one_large_row_group_is_read_in_small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pandas writes it: all rows in one group."""
    noise = np.random.default_rng(0)
    table = pa.table({"n": list(range(200)), "image": [noise.bytes(1 << 12) for _ in range(200)]})
    pq.write_table(table, tmp_path / "a.parquet")
    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 1 << 16)
    monkeypatch.setattr(parquet, "COPIED_GROUP_BYTES", 1 << 14)
    cache = access.GroupCache(1 << 16)
    rows = opened(str(tmp_path / "a.parquet"), tmp_path, cache=cache)
    order = np.random.default_rng(1).permutation(200).tolist()
    assert [rows[n]["n"] for n in order] == order
    assert cache.num_bytes <= 1 << 16
    (copy,) = (tmp_path / "cache" / "rows").iterdir()
    stamp = copy.stat().st_mtime_ns
    assert opened(str(tmp_path / "a.parquet"), tmp_path)[7]["n"] == 7
    assert copy.stat().st_mtime_ns == stamp, "made once"
    assert rows.where(150) == "a.parquet row 150"


def test_a_folder_of_images_with_a_table(tmp_path: Path) -> None:
    folder = tmp_path / "pets" / "train"
    folder.mkdir(parents=True)
    Image.new("RGB", (3, 2), (1, 2, 3)).save(folder / "cat.png")
    (folder / "metadata.csv").write_text("file_name,text\ncat.png,A cat?\n,No picture\n")
    for source in (str(folder), f"{tmp_path / 'pets'}@train"):
        rows = opened(source, tmp_path)
        assert rows.columns == ["image", "text"]
        images, texts = ["cat.png", None], ["A cat?", "No picture"]
        assert [(row["image"], row["text"]) for row in rows] == [*zip(images, texts, strict=True)]
        assert (rows.where(0), list(rows.column("image"))) == ("train/metadata.csv line 2", images)
        (ref,) = image_refs(rows[0]["image"], where="w", folder=rows.folder(0))
        assert from_array(ref).getpixel((0, 0)) == (1, 2, 3)
        assert opened(source, tmp_path, image_root="/pictures").folder(0) == "/pictures"
    (folder / "metadata.csv").unlink()
    (folder / "metadata.jsonl").write_text('{"file_names": ["cat.png", "cat.png"], "mask_file_name": "cat.png"}\n')
    assert dict(opened(str(folder), tmp_path)[0]) == {"images": ["cat.png", "cat.png"], "mask": "cat.png"}


def test_datasets_of_hugging_face_keep_their_images_encoded(tmp_path: Path) -> None:
    made = datasets.Dataset.from_dict({"image": [{"bytes": PNG, "path": None}], "n": [7]})
    made.cast_column("image", datasets.Image()).save_to_disk(tmp_path / "saved")
    rows = opened(str(tmp_path / "saved"), tmp_path)
    assert rows[0] == {"image": {"bytes": PNG, "path": None}, "n": 7}
    assert list(rows.column("n")) == [7]


def test_splits_of_a_dataset_are_named(tmp_path: Path) -> None:
    name = as_saved_splits(tmp_path).removesuffix("@train")
    assert len(opened(f"{name}@test", tmp_path)) == 1
    for source, problem in [
        (name, f"no split named; its splits are train, test; write {name}@train"),
        (f"{name}@dev", "no split 'dev'; its splits are train, test"),
        (f"{as_jsonl(tmp_path)}@train", "a file has no splits; name it without @train"),
    ]:
        with pytest.raises(DataError, match=problem):
            opened(source, tmp_path)


def test_a_folder_of_parquet_files_is_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "repo" / "data").mkdir(parents=True)
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "repo" / "data" / f"{split}-00000-of-00001.parquet")
    assert [dict(row) for row in opened(f"{tmp_path / 'repo'}@test", tmp_path)] == ROWS


def test_a_hub_id_without_a_network_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the data set no-such/data-set cannot be loaded") as error:
        opened("no-such/data-set@train", tmp_path)
    assert "\n" not in str(error.value)
    with pytest.raises(DataError, match=r"a data set of the hub is written no-such/data-set@train"):
        opened("no-such/data-set", tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("gcsfs") is not None, reason="the package is there")
def test_a_protocol_whose_package_is_missing_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(MissingExtraError, match=re.escape(pip_install("gs"))):
        opened("gs://bucket/train.parquet", tmp_path)


def test_a_remote_file_and_the_images_beside_it(tmp_path: Path) -> None:
    table = '{"image": "pictures/a b.png"}\n{"image": "../secret.png"}\n{"image": "/etc/passwd"}\n'
    with served({"/data/rows.jsonl": table.encode()}) as site:
        url = f"{site.url}/data/rows.jsonl"
        with pytest.raises(DataError, match=r"; set allow_private_addresses=true"):
            opened(url, tmp_path)
        limits = UrlLimits(allow_private_addresses=True, retries=0)
        with pytest.raises(DataError, match=r"none.jsonl: the server answers 404 Not Found; correct the address, or"):
            opened(f"{site.url}/none.jsonl", tmp_path, url_limits=limits)
        rows = opened(url, tmp_path, url_limits=limits)
        assert rows.where(1) == "rows.jsonl line 2"
        (ref,) = image_refs(rows[0]["image"], where="w", folder=rows.folder(0))
        assert ref.source == f"{site.url}/data/pictures/a%20b.png"
        for row in (1, 2):
            with pytest.raises(BadRowError, match=r"leads out of http://"):
                image_refs(rows[row]["image"], where="w", folder=rows.folder(row))


def test_images_beside_a_table_in_a_bucket() -> None:
    refs = image_refs("a.png", "gs://c/a.png", where="w", folder="s3://b/data")
    assert [ref.source for ref in refs] == ["s3://b/data/a.png", "gs://c/a.png"]
    for image in ("memory://b/a.png", "file:///etc/passwd", "../a.png", "/a.png"):
        with pytest.raises(BadRowError, match=r"leads out of s3://b/data") as error:
            image_refs(image, where="w", folder="s3://b/data")
        assert error.value.reason == "image_outside_folder"


def forms() -> Sequence[object]:
    text = base64.b64encode(PNG).decode()
    return [
        *(PNG, bytearray(PNG), {"bytes": PNG, "path": "a.png"}, {"bytes": None, "path": "a.png"}, "a.png"),
        *(np.frombuffer(PNG, np.uint8), np.array(PNG), np.full((2, 3, 3), (1, 2, 3), np.uint8)),
        Image.new("RGB", (3, 2), (1, 2, 3)),
        *(text, "\n".join(text[start : start + 60] for start in range(0, len(text), 60))),
        f"data:image/png;base64,{text}",
    ]


def test_every_form_of_an_image(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    for image in forms():
        for cell in (image, [image], (image,)):
            (ref,) = image_refs(cell, where="w", folder=tmp_path)
            opened_image = from_array(ref)
            assert (opened_image.size, opened_image.getpixel((0, 0))) == ((3, 2), (1, 2, 3)), image
    objects = np.empty(2, dtype=object)
    objects[:] = [{"bytes": PNG, "path": None}, "a.png"]
    assert len(image_refs(objects, None, forms(), where="w", folder=tmp_path)) == 2 + len(forms())


@table(
    ("cell", "reason"),
    [
        *((cell, "image_kind") for cell in ("", 3, [[PNG]], [None], {"bytes": None, "path": None}, {"url": "x"})),
        ("a." + "/" * 100_000 + "b.png", "image_kind"),  # 0.1 s, were it resolved
        *((f"data:{text}", "image_base64") for text in ("text/plain,hello", "image/png;base64,%%%")),
        (base64.b64encode(PNG).decode()[:-5] + "!", "image_base64"),
        *(({"bytes": None, "path": path}, "image_outside_folder") for path in ("/etc/passwd", "in/../../secret.png")),
        *(
            (path, "image_outside_folder")
            for path in ("../a.png", "a\0b.png", "file:///etc/passwd", "sftp://host/a.png")
        ),
        *((f"{url}/a.png::file:///etc/passwd", "url_invalid") for url in ("s3://bucket", "http://[::1]")),
    ],
)
def test_what_is_no_image_of_the_row(cell: object, reason: str, tmp_path: Path) -> None:
    with pytest.raises(BadRowError) as error:
        image_refs(cell, where="rows.csv row 1", folder=tmp_path)
    assert error.value.reason == reason
    assert str(error.value).startswith("rows.csv row 1, image 1: ")
