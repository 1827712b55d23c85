"""`fovea saliency`: show where a picture matters for an answer. Torch is imported when the command runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from fovea.cli.evaluate import sort_words
from fovea.cli.texts import Debug, Quiet, Trust, complete_recipe, complete_run, one_line_errors
from fovea.config.recipes import find_recipe
from fovea_gym.errors import ConfigError
from fovea_gym.utils.shown_text import printable

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def saliency(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|FOLDER [KEY=VALUE]...",
            help="A run (its newest checkpoint), a checkpoint, or a model folder.",
            autocompletion=complete_run,
        ),
    ],
    rows: Annotated[
        str,
        typer.Option("--row", "--rows", metavar="ROWS", help="Rows of the split from 0 on, such as 3, 0-9 or 3,5,8."),
    ] = "0",
    recipe: Annotated[
        str | None,
        typer.Option(metavar="RECIPE", autocompletion=complete_recipe, help="Recipe of the rows; default: the run's."),
    ] = None,
    split: Annotated[Literal["test", "dev", "train"], typer.Option(help="Split of the rows.")] = "test",
    image: Annotated[int, typer.Option(min=1, help="Number of the picture in the prompt.")] = 1,
    patch_px: Annotated[
        int | None, typer.Option(min=1, help="Side of a patch in pixels; default: 1/16 of the longer side.")
    ] = None,
    answer: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Answer; default: the model's greedy answer.")
    ] = None,
    recorded: Annotated[
        str | None,
        typer.Option(
            metavar="WHICH",
            help="Recorded answers of the run: an evaluation, such as test-before, or STEP:GROUP:ANSWER of a "
            "training sample, numbered from 1.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="PNG to write, with a .json of its numbers; default: in the run's folder, with a page of all maps.",
        ),
    ] = None,
    trust: Trust = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Show where a picture matters for an answer.

    Hides one patch of the picture at a time, and writes the picture with those patches lit without which the answer is
    less likely. The run's folder gets a page of all its maps, saliency/index.html. Examples: fovea saliency runs/shapes
    --rows 0-9; fovea saliency runs/shapes --recorded 50:1:3; fovea saliency runs/boxes --row 7 --patch-px 4 --answer
    '[2,3,5,6]'.
    """
    with one_line_errors(debug=debug):
        (target, *others), overrides = sort_words(words)
        if others:
            raise ConfigError(f"{others[0]}: fovea saliency takes only one model")
        from fovea_tools.saliency.occluder import Wanted, row_numbers, write_maps

        asked = {"answer": answer, "recorded": recorded}
        wanted = Wanted(rows=row_numbers(rows), split=split, image=image, patch_px=patch_px, **asked)
        for found, file in write_maps(
            target,
            wanted,
            overrides,
            (lambda _: None) if quiet else _say,
            recipe=None if recipe is None else find_recipe(recipe),
            out=out,
            trust=trust,
        ):
            _say(printable(f"{found.id}: {found.answer}"))
            _say(str(file))


def _say(text: str) -> None:
    typer.echo(text)
    sys.stdout.flush()
