"""Three rows as they are read from every file format."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from fovea_gym.rows.access import RowAccess
from fovea_gym.rows.rows import Rows, open_rows

ROWS = [
    {"n": "0", "text": "plain", "image": "a.png"},
    {"n": "1", "text": 'with "quotes", commas\nand a line break', "image": "b.png"},
    {"n": "2", "text": "ünïcödé ]}[{", "image": None},
]


def as_csv(path: Path) -> str:
    pd.DataFrame(ROWS).to_csv(path / "r.csv", index=False)
    return str(path / "r.csv")


def opened(source: object, tmp_path: Path, **access: object) -> Rows:
    return open_rows([source], access=RowAccess(cache_dir=tmp_path / "cache", **access))  # type: ignore[arg-type, list-item]
