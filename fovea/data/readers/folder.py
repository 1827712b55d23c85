"""A folder of images with a table, as Hugging Face's imagefolder has it: `metadata.csv`, .jsonl or .parquet.

The table's column `file_name` holds paths in the folder and is read as `image`, `mask_file_name` as `mask`, and
`file_names`, a list, as `images`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from fovea.data.readers.base import Table

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


def metadata_of(folder: Path) -> Path | None:
    """The metadata table of an image folder; None where it has none."""
    return next((folder / name for name in METADATA if (folder / name).is_file()), None)


class ImageFolder:
    """The rows of an image folder's table, its columns of paths renamed to columns of images."""

    def __init__(self, table: Table, folder: Path) -> None:
        self._table = table
        self._names = {column: shown_as(column) for column in table.columns}
        self.name, self.key, self.folder = f"{folder.name}/{table.name}", table.key, str(folder)
        self.columns: Sequence[str] = list(self._names.values())

    def __len__(self) -> int:
        return len(self._table)

    def row(self, index: int) -> dict[str, object]:
        return {shown_as(column): cell for column, cell in self._table.row(index).items()}

    def place(self, index: int) -> str:
        return self._table.place(index)

    def column(self, name: str) -> Iterable[object]:
        return self._table.column(next((own for own, shown in self._names.items() if shown == name), name))


def shown_as(column: str) -> str:
    """The name of a column of paths as a column of images; other columns keep theirs."""
    if column in {"file_name", "file_names"}:
        return "image" if column == "file_name" else "images"
    return column.removesuffix("_file_name").removesuffix("_file_names")
