"""`fovea import-config`: a recipe from settings of verl or RLinf. Torch is imported only if GPUs are counted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fovea.cli.texts import Debug, one_line_errors
from fovea_gym.errors import ConfigError
from fovea_tools.importer.reading import read, system_of, where_of
from fovea_tools.importer.source import EnvironmentName
from fovea_tools.importer.translate import recipe_text, translate

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(context_settings={"ignore_unknown_options": True})
def import_config(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE|KEY=VALUE", help="YAML files, shell scripts or settings; settings win over files."
        ),
    ] = None,
    system: Annotated[
        Literal["verl", "rlinf"] | None, typer.Option(help="The system of the settings, if it is not clear from them.")
    ] = None,
    environment: Annotated[
        EnvironmentName | None, typer.Option(help="Environment of the rows; verl's settings do not name one.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="RECIPE", help="Write a new file; default: stdout.")] = None,
    debug: Debug = False,
) -> None:
    """Make a recipe from settings of verl or RLinf.

    Settings with a counterpart are converted, including their units and the other system's defaults; a comment after
    each names its source. The rest is listed with reasons, and settings that contradict each other are an error.
    Examples: fovea import-config run_qwen2_5_vl-7b.sh --environment geo3k; fovea import-config
    qwen3-vl-2b-grpo-fsdp-geo3k.yaml runner.max_steps=750 --out mine.yaml. To see the whole table: python -m
    fovea_tools.importer.docs verl.
    """
    with one_line_errors(debug=debug):
        given = read(words or [])
        if not given:
            raise ConfigError("no settings found; write fovea import-config FILE [KEY=VALUE]...")
        translation = translate(system_of(given, system), given, environment, _count_gpus)
        text = recipe_text(translation, where_of(given))
        if out is None:
            typer.echo(text, nl=False)
        elif out.exists():
            raise ConfigError(f"{out}: the file exists already; give another --out")
        else:
            out.write_text(text, encoding="utf-8")
        lost = len(translation.left) + len(translation.unknown)
        typer.echo(
            f"{len(translation.lines)} settings; {lost} left out, with reasons at the top of the recipe", err=True
        )


def _count_gpus() -> int:
    # most imports need no torch, whose import takes seconds
    import torch

    return torch.cuda.device_count()
