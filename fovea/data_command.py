"""`fovea data NAME`: fetch or render a data set. Every name is a command of its own, with its own options.

They import what they run when they run, like the commands of cli.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fovea.cli_errors import one_line_errors

app = typer.Typer(help="Fetch or render a data set.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def data() -> None:
    """Fetch or render a data set."""


@app.command()
def geospot(
    out: Annotated[Path, typer.Option(help="Folder of train.parquet and test.parquet.")] = Path("data/geospot"),
    rows: Annotated[int, typer.Option(min=1, help="Training rows; a tenth as many test rows come on top.")] = 20_000,
    seed: Annotated[int, typer.Option(min=0, help="Of places and scales.")] = 0,
    image_side_px: Annotated[int, typer.Option(min=32, max=1024, help="Width and height of a map.")] = 64,
) -> None:
    """Render locator maps, offline, from GeoNames' cities."""
    with one_line_errors():
        from fovea.environments.geospot.rendered import write_maps

        typer.echo("reading places and drawing maps ...", err=True)
        for file in write_maps(out, num_rows=rows, seed=seed, image_side_px=image_side_px):
            typer.echo(file)
