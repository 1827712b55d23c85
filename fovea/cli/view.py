"""The command `fovea view`. Imports are deferred, as in `main.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fovea.cli.completion import complete_run
from fovea.cli.errors import one_line_errors
from fovea.cli.options import Debug


def view(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Run folders; they may still be going. Two are compared.",
            autocompletion=complete_run,
        ),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0: any that is free.")] = 8377,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write the page into a new folder, to be opened without a server."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Watch runs on a page of this machine.

    Live curves; prompts, images and answers of the recorded steps with rewards and advantages, token by token.
    The page answers this machine only; from elsewhere, forward its port (ssh -L 8377:127.0.0.1:8377 HOST).
    Examples: fovea view runs/latest; fovea view runs/grpo runs/ppo --export compared (docs/view.md).
    """
    with one_line_errors(debug=debug):
        from fovea.view.export import export as export_page
        from fovea.view.server import serve
        from fovea.view.viewed_run import ViewedRun

        viewed = list(map(ViewedRun, runs))
        if export is not None:
            typer.echo(export_page(viewed, export))
        else:
            serve(viewed, port, lambda address: typer.echo(f"{address} (Ctrl-C ends it)"))
