"""Tables that the benchmarks print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

WIDTH = 130


def as_table(title: str, headers: Sequence[str], rows: Iterable[Sequence[str]], *, num_left: int = 1) -> Table:
    """A table whose first `num_left` columns are aligned left, for text, and the others right, for numbers."""
    table = Table(title=title, title_justify="left")
    for place, header in enumerate(headers):
        table.add_column(header, justify="left" if place < num_left else "right")
    for row in rows:
        table.add_row(*row)
    return table


def show(*tables: Table | str) -> None:
    """Print tables and lines of text with a fixed width, also if stdout is not a terminal."""
    console = Console(width=WIDTH)
    for table in tables:
        console.print(table)
