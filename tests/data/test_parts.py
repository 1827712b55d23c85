"""Parts of data sets and files, named as datasets names those of splits."""

from __future__ import annotations

from pathlib import Path

import datasets
import pandas as pd
import pytest

from fovea.errors import DataError
from tests.data.three_rows import as_csv, opened


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
