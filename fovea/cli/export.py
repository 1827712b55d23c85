"""The command `fovea export`. Imports are deferred, because importing torch takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fovea.cli.completion import complete_run
from fovea.cli.errors import one_line_errors
from fovea.cli.options import Debug, Trust

WORDS_HELP = "Settings of the run to override, such as model.path=NEW/FOLDER or model.device=cpu."


def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|CHECKPOINT",
            help="A run folder (its newest checkpoint), or one checkpoint.",
            autocompletion=complete_run,
        ),
    ],
    words: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help=WORDS_HELP)] = None,
    *,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Output folder; new or empty.")],
    adapter_only: Annotated[
        bool,
        typer.Option("--adapter-only", help="Export the LoRA adapter in peft's format instead of the merged model."),
    ] = False,
    push: Annotated[
        str | None,
        typer.Option(metavar="ORG/NAME", help="Upload the folder to this hub repository (a new one is private)."),
    ] = None,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Export a model as a verified Hugging Face folder.

    It is loaded again, and its log-probs are compared with the checkpoint's. Example:
    fovea export runs/geo3k/checkpoints/step-500 --out exported/geo3k.
    """
    with one_line_errors(debug=debug):
        from fovea.exporting.export import check_repo
        from fovea.exporting.export import export as export_model
        from fovea.exporting.export import push as push_folder

        if push is not None:
            check_repo(push)
        done = export_model(source, out, adapter_only=adapter_only, overrides=words or [], trust=trust)
        typer.echo(
            f"{done.folder}: loaded again, its log-probs differ from the checkpoint's by "
            f"{done.max_logprob_difference:.1e} at most"
        )
        if done.left_out:
            typer.echo(f"not exported (value function): {', '.join(done.left_out)}")
        if push is not None:
            typer.echo(push_folder(done.folder, push))
