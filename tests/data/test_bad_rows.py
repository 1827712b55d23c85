"""The list of dropped rows: once each, under their reasons, and as it was at the checkpoint after a resume."""

from __future__ import annotations

import json
from pathlib import Path

from fovea.data.bad_rows import BAD_ROWS_FILE, BadRows
from fovea.data.order import RowPlace
from fovea.errors import BadRowError, DataError


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
