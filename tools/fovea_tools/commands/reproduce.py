"""`fovea reproduce`: train with the settings of a published result, and compare. Torch is imported on use."""

from __future__ import annotations

import shlex
import textwrap
from typing import Annotated

import typer

from fovea.cli.texts import WIDTH, Debug, one_line_errors, sort_words
from fovea_gym.errors import ConfigError
from fovea_tools.published.catalogue import PublishedResult, find_result, published_results

app = typer.Typer(add_completion=False, rich_markup_mode=None)


def complete_result(incomplete: str) -> list[str]:
    """Names of the published results that begin with this text."""
    return [name for name in published_results() if name.startswith(incomplete)]


@app.command(context_settings={"ignore_unknown_options": True})
def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="Name of a result, as --list prints it.", autocompletion=complete_result)
    ] = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="RECIPE|KEY=VALUE", help="Recipes and settings that override the published ones."),
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the published results.")] = False,
    debug: Debug = False,
) -> None:
    """Train with the settings of a published result, and compare.

    Fetches the rows or explains how to get them, trains on all GPUs of this machine, evaluates, and writes a page with
    the published figure, the new one with its interval, the curves, and every setting that differs. Called again, the
    command continues from the newest checkpoint. Examples: fovea reproduce --list; fovea reproduce easyr1_geo3k_7b;
    fovea reproduce easyr1_geo3k_7b tiny max_steps=2, to try it on a CPU.
    """
    with one_line_errors(debug=debug):
        if show_list:
            typer.echo("\n".join(map(_listed, published_results().values())))
            return
        if name is None:
            raise ConfigError("no result named; write fovea reproduce NAME (`fovea reproduce --list` prints the names)")
        result = find_result(name)
        recipes, overrides = sort_words([*result.recipes, *(words or [])], command="reproduce")
        from fovea_tools.published.reproduce import check_memory, fetch_rows, prepare, train, write_page

        run = prepare(result, recipes, overrides)
        check_memory(run)
        fetch_rows(run, _say)
        _say(f"{result.title}; published: {result.figure_text}\n{shlex.join(run.command)}")
        if exit_code := train(run):
            raise typer.Exit(exit_code)
        typer.echo(write_page(run))


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _listed(result: PublishedResult) -> str:
    lines = (f"{result.name:<24}{result.title}", f"{'':<24}{result.figure_text}; GPUs: {result.gpus}")
    return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent=" " * 24) for line in lines)
