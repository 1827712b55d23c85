"""Tables that benchmarks print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

WIDTH = 130


def as_table(title: str, headers: Sequence[str], rows: Iterable[Sequence[str]], *, num_left: int = 1) -> Table:
    """A table with `num_left` columns of text, aligned left, and then numbers, aligned right."""
    table = Table(title=title, title_justify="left")
    for place, header in enumerate(headers):
        table.add_column(header, justify="left" if place < num_left else "right")
    for row in rows:
        table.add_row(*row)
    return table


def show(*tables: Table | str) -> None:
    """Print tables and lines, also where stdout is not a terminal and has no width."""
    console = Console(width=WIDTH)
    for table in tables:
        console.print(table)
