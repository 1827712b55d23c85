"""`fovea plan`: memory and time of a step on a machine. Torch is imported when the command runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from fovea.cli.texts import Debug, Words, one_line_errors, sort_words
from fovea.config.loading import load_config

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(context_settings={"ignore_unknown_options": True})
def plan(
    words: Words = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with sizes in bytes.")] = False,
    debug: Debug = False,
) -> None:
    """Estimate the memory and time of a step.

    Prints memory by part and GPU, and seconds by phase, for a recipe on a machine. Reads the model's config.json and no
    weights. If the step does not fit, the command suggests settings to change and ends with exit code 1. Example: fovea
    plan geo3k plan.gpus=8 plan.gpu=h100 (docs/plan.md).
    """
    with one_line_errors(debug=debug):
        recipes, overrides = sort_words(words or [], command="plan")
        config = load_config(recipes, overrides)
        import torch
        from rich.console import Console

        from fovea_tools.plan.machine import machine_of
        from fovea_tools.plan.plan import advice_for, make_plan
        from fovea_tools.plan.table import plan_tables
        from fovea_tools.probe.rates import with_cpu_rates

        machine = machine_of(config.plan, config.cluster, config.model.device)
        planned = make_plan(config, machine=with_cpu_rates(machine, getattr(torch, config.model.dtype)))
        advice = [] if planned.fits else advice_for(config)
        if as_json:
            typer.echo(json.dumps(planned.to_json() | {"advice": [asdict(each) for each in advice]}, indent=2))
        else:
            Console(highlight=False).print(plan_tables(planned, advice))
    if not planned.fits:
        raise typer.Exit(1)
