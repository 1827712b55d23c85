"""The command `fovea grade`. Imports are deferred, as in `main.py`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fovea.cli.errors import one_line_errors
from fovea.cli.options import Debug
from fovea.config.environments import Gradable


def grade(
    env: Annotated[Gradable, typer.Argument(metavar="ENV", help="geo3k, vqa, caption, geospot or shapes.")],
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.jsonl", help="Rows with `prediction` (the whole completion) and `truth`; - is stdin."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write rows to FILE and the summary to stdout; default: rows to stdout."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Score a file of answers by accuracy.

    The graders are those of a run. `score` is its accuracy (geospot: the reward of the last stage), not its reward: a
    share for the form of an answer (environment.format_weight) is not in it, but the form is among `parts`.
    Adds `score`, `parts` and `reason` to every row, and prints a summary: one line of JSON, which goes to stderr
    without --out, so that stdout holds only rows. A row that cannot be graded has the score null and is counted by
    reason. Exit code 2 if no row can be graded.
    """
    with one_line_errors(debug=debug):
        from fovea.evaluation.grade_file import check_files, grade_file

        file = Path("/dev/stdin") if str(file) == "-" else file
        check_files(env, file, out)
        if out is None:
            summary = grade_file(env, file, lambda line: typer.echo(line, nl=False))
        else:
            with out.open("wb") as lines:
                summary = grade_file(env, file, lines.write)
        typer.echo(json.dumps(asdict(summary)), err=out is None)
