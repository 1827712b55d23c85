"""Rows that a run leaves out, and the commands that write missing files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fovea.config.loading import load_config
from fovea.data.bad_rows import BAD_ROWS_FILE, BadRows
from fovea.wiring.images import make_access, make_opener, result_limits
from fovea_gym.errors import BadRowError, DataError
from fovea_gym.rows.rows import MADE, open_rows
from fovea_gym.rows.tasks import RowPlace
from fovea_gym.tools.base import BadResultError
from fovea_gym.tools.results import checked_parts
from fovea_gym.types import ImageRef
from fovea_tools.commands.data import app as data_app


def test_a_file_that_a_command_writes_is_told_with_it() -> None:
    with pytest.raises(DataError, match=r"data/easy_vqa/train\.parquet; `fovea data easy-vqa` writes it$"):
        open_rows(["data/easy_vqa/train.parquet"])
    commands = [
        command.name or command.callback.__name__ for command in data_app.registered_commands if command.callback
    ]
    assert {name.replace("-", "_") for name in commands} == set(MADE)


def test_errors_about_rows_and_images_name_the_settings_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "a.jsonl").write_text('{"image": "../../etc/passwd"}')
    turned = Image.new("RGB", (40, 40))
    turned.getexif()[0x0112] = 6
    words = ["model.tiny={}", f"data.cache_dir={tmp_path}/file", f"data.image_root={tmp_path}"]
    limits = ["data.max_image_mib=0.0001", "data.max_image_megapixels=0.01", "data.convert_images=[]"]
    data = load_config([], [*words, *limits]).data
    opener, access = make_opener(data, tmp_path), make_access(data)
    rows = open_rows([str(tmp_path / "a.jsonl")], access=access)
    calls: dict[str, Callable[[], object]] = {
        "data.max_image_mib=0.0001": lambda: opener(ImageRef(source=b"x" * 200)),
        "data.max_image_megapixels=0.01": lambda: opener(ImageRef(source=np.zeros((200, 200, 3), np.uint8))),
        "add rotated to data.convert_images": lambda: opener(ImageRef(source=turned)),
        "set data.allow_private_addresses=true": lambda: opener(ImageRef(source="http://127.0.0.1:9/a.png")),
        "set data.image_root": lambda: rows.image_refs(0, rows[0]["image"]),
        "set data.cache_dir": lambda: open_rows([f"file://{tmp_path}/a.jsonl"], access=access),
        f"inside data.image_root={tmp_path}": lambda: checked_parts(
            [ImageRef(source="/etc/passwd")], "look", result_limits(data, opener)
        ),
    }
    for setting, call in calls.items():
        with pytest.raises((DataError, BadResultError)) as error:
            call()
        assert setting in str(error.value)
        assert "on_bad_row" not in str(error.value), "the place that ends the run at a bad row says so"


def place(n: int) -> RowPlace:
    return RowPlace(f"/data/a.jsonl row {n}", f"a.jsonl row {n}")


def test_each_row_once_and_counted_by_reason(tmp_path: Path) -> None:
    rows = BadRows(tmp_path)
    rows.add(place(1), BadRowError("a.jsonl row 1: no; fix", "image_missing"))
    rows.add(place(1), BadRowError("a.jsonl row 1: again", "image_empty"))
    rows.add(place(2), DataError("a.jsonl row 2: what an environment of a user says"))
    rows.add(place(3), BadRowError("a.jsonl row 3: no", "image_missing"))
    assert place(2).key in rows
    assert place(4).key not in rows
    assert rows.metrics() == {
        "data/rows_skipped": 3,
        "data/rows_skipped/image_missing": 2,
        "data/rows_skipped/other": 1,
    }
    lines = [json.loads(line) for line in (tmp_path / BAD_ROWS_FILE).read_text().splitlines()]
    assert [(line["row"], line["reason"]) for line in lines] == [
        ("a.jsonl row 1", "image_missing"),
        ("a.jsonl row 2", "other"),
        ("a.jsonl row 3", "image_missing"),
    ]
    assert lines[0]["error"] == "a.jsonl row 1: no; fix"


def test_a_resumed_run_knows_what_it_knew_at_its_checkpoint(tmp_path: Path) -> None:
    first = BadRows(tmp_path)
    for n in range(3):
        first.add(place(n), BadRowError(f"row {n}\u2028: no", "image_missing"))
    resumed = BadRows(tmp_path, resume_at=2)
    assert len(resumed) == 2
    assert [place(n).key in resumed for n in range(3)] == [True, True, False]
    resumed.add(place(2), BadRowError("row 2: no", "url_timeout"))
    assert len((tmp_path / BAD_ROWS_FILE).read_text().splitlines()) == 3
    assert resumed.metrics()["data/rows_skipped/url_timeout"] == 1
    assert len(BadRows(tmp_path)) == 0, "a new run begins a new list"
    assert (tmp_path / BAD_ROWS_FILE).read_text() == ""


def test_nothing_dropped_is_a_zero() -> None:
    assert BadRows().metrics() == {"data/rows_skipped": 0}


@pytest.mark.parametrize(
    "tail",
    [b"\0" * 64, b'{"key": "/data/a.js', b"\0" * 64 + b"\n", b"[1]\n", b"\xff\xfe\n"],
    ids=["nuls", "half a line", "a line of nuls", "a list", "no text"],
)
def test_a_resumed_run_drops_damaged_lines_and_lists_their_rows_again(tail: bytes, tmp_path: Path) -> None:
    """As a failure of the machine leaves them; the next row would be glued to half a line."""
    first, file = BadRows(tmp_path), tmp_path / BAD_ROWS_FILE
    for n in range(3):
        first.add(place(n), BadRowError(f"row {n}: no", "image_missing"))
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + tail)
    resumed = BadRows(tmp_path, resume_at=3)
    assert ([place(n).key in resumed for n in range(3)], resumed.num_lost) == ([True, False, False], 2)
    for n in (1, 2):
        resumed.add(place(n), BadRowError(f"row {n}: no", "image_missing"))
    assert file.read_bytes().splitlines(keepends=True) == lines
    assert BadRows(tmp_path, resume_at=3).num_lost == 0
