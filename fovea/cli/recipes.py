"""The command `fovea recipes`: the recipes that come with Fovea."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from fovea.cli.errors import one_line_errors
from fovea.cli.options import Debug
from fovea.config.recipes import recipes_folder, shipped_recipes
from fovea.errors import DataError

NEEDS = "# Needs: "
"""Start of the line in the head of a recipe that says what it takes."""
NEEDS_ANOTHER = "another recipe before it"
"""What a recipe needs that is nothing by itself."""
SENTENCE = re.compile(r".*?[.](?=\s|$)")
WIDTH = 110


class Described(NamedTuple):
    """The first sentence of a recipe's head, and what it needs."""

    text: str
    needs: str


def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this recipe's file.", metavar="[NAME]")] = None,
    debug: Debug = False,
) -> None:
    """List the recipes that come with Fovea.

    Every command that takes a recipe's file takes such a name. Examples: fovea train shapes; fovea recipes shapes >
    mine.yaml, to change a copy.
    """
    with one_line_errors(debug=debug):
        if name is None:
            typer.echo("\n".join(_listed(each, describe_recipe(file)) for each, file in shipped_recipes().items()))
            typer.echo(
                f"\nrun one: fovea train NAME [KEY=VALUE]...; see one: fovea recipes NAME\nfiles: {recipes_folder()}"
            )
        else:
            typer.echo(_text_of(name), nl=False)


def describe_recipe(file: Path) -> Described:
    """What the head of a recipe says; DataError where it lacks its line of needs."""
    lines = file.read_text(encoding="utf-8").splitlines()
    needs = [line.removeprefix(NEEDS) for line in lines if line.startswith(NEEDS)]
    head = " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))
    sentence = SENTENCE.match(head)
    if not needs or sentence is None:
        raise DataError(f"{file}: its head lacks a sentence or a line `{NEEDS}...`; write both")
    return Described(sentence.group(), needs[0])


def _listed(name: str, described: Described) -> str:
    shown = (f"{name:<20}{described.text}", f"{'':<20}needs {described.needs}")
    return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent=" " * 20) for line in shown)


def _text_of(name: str) -> str:
    shipped = shipped_recipes()
    if name not in shipped:
        raise DataError(f"{name}: no recipe that comes with Fovea; there are {', '.join(shipped)}")
    return shipped[name].read_text(encoding="utf-8")
