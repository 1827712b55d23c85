"""The command `fovea eval`. Imports are deferred, because importing torch takes seconds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from fovea.cli.completion import complete_recipe, complete_run
from fovea.cli.errors import one_line_errors
from fovea.cli.options import Debug, Quiet, Trust
from fovea.config.recipes import find_recipe
from fovea.errors import ConfigError

TARGETS_HELP = (
    "A run, a checkpoint, a model folder or hub id (ORG/NAME or ORG/NAME@REVISION), a server (http://HOST:PORT or "
    "http://HOST:PORT#MODEL, OpenAI-compatible), or a baseline: majority (the most "
    "frequent training answer, by question type), gold (the gold answer), constant:TEXT."
)
SETTING = re.compile(r"[A-Za-z_][\w.]*=")


def evaluate(
    words: Annotated[
        list[str],
        typer.Argument(metavar="TARGET... [KEY=VALUE]...", help=TARGETS_HELP, autocompletion=complete_run),
    ],
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="RECIPE",
            autocompletion=complete_recipe,
            help="Rows and grader; default: the settings of the first target that is a run.",
        ),
    ] = None,
    split: Annotated[Literal["test", "dev", "train"], typer.Option(help="Split to evaluate on.")] = "test",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write metrics and every answer to this file.")
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with metrics and example rows.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="VARIABLE", help="Environment variable with the key that servers want.")
    ] = None,
    trust: Trust = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Evaluate targets side by side on the same rows.

    Examples: fovea eval runs/shapes majority --html eval.html; fovea eval Qwen/Qwen3-VL-2B-Instruct runs/geo3k
    exported/geo3k evaluate.samples_per_prompt=8 rollout.temperature=0.8.
    """
    with one_line_errors(debug=debug):
        targets, overrides = sort_words(words)
        from fovea.utils.malloc import tune_allocators

        tune_allocators()
        from fovea.eval_targets import OutputFiles, evaluate_targets

        output_files = OutputFiles(json_file=json_file, html_file=html_file)
        evaluate_targets(
            targets,
            overrides,
            recipe=None if recipe is None else find_recipe(recipe),
            split=split,
            output_files=output_files,
            trust=trust,
            api_key_env=api_key_env,
            quiet=quiet,
        )


def sort_words(words: list[str]) -> tuple[list[str], list[str]]:
    """The words split into targets and settings; ConfigError without a target."""
    overrides = [word for word in words if SETTING.match(word) and not Path(word).exists()]
    targets = [word for word in words if word not in overrides]
    if not targets:
        raise ConfigError("no target given; write fovea eval runs/shapes [TARGET]... [KEY=VALUE]...")
    return targets, overrides
