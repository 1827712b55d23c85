"""The command `fovea view`. Imports are deferred, as in `main.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fovea.cli.texts import Debug, one_line_errors
from fovea.cli.words import complete_run


def view(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Run folders, which may still be going; two are compared. Or one folder of runs.",
            autocompletion=complete_run,
        ),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0: any that is free.")] = 8377,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the page into one HTML file, to be opened without a server."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Watch runs on a page of this machine.

    Live curves; prompts, images and answers of the recorded steps with rewards and advantages, token by token; answers
    to held-out rows; settings and console. A folder of runs gets a list of them.
    The page answers this machine only; from elsewhere, forward its port (ssh -L 8377:127.0.0.1:8377 HOST).
    Examples: fovea view runs; fovea view runs/latest; fovea view runs/grpo --export page.html (docs/view.md).
    """
    with one_line_errors(debug=debug):
        from fovea.report.about import check_run_folder
        from fovea.report.export import check_export
        from fovea.report.export import export as export_page
        from fovea.report.viewed_run import ViewedRun
        from fovea.view.list_app import make_list_app
        from fovea.view.run_list import is_folder_of_runs
        from fovea.view.server import make_app, serve

        if export is None and len(runs) == 1 and is_folder_of_runs(runs[0]):
            app = make_list_app(runs[0])
        else:
            for run in runs:
                check_run_folder(run)
            viewed = list(map(ViewedRun, runs))
            if export is not None:
                check_export(export)
                typer.echo(export_page(viewed, export))
                return
            app = make_app(viewed)
        serve(app, port, lambda address: typer.echo(f"{address} (Ctrl-C ends it)"))
