"""The commands `fovea workflow ...`: JSON in, JSON on stdout, and all that a run says on stderr."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from typing import Annotated, Any, TypeAlias

import typer

from fovea.cli.errors import one_line_errors
from fovea.cli.options import Debug, Trust
from fovea.workflows.inputs import EvaluationInputs, TrainingInputs, read_inputs

Source: TypeAlias = Annotated[
    str, typer.Option("--input", metavar="FILE|JSON", help="Inputs as a JSON object, or a file that holds one.")
]

app = typer.Typer(help="Run a published workflow of mixtrain.", no_args_is_help=True)


@app.command("vlm-rl-training")
def vlm_rl_training(source: Source = "{}", trust: Trust = False, debug: Debug = False) -> None:
    """Train by PPO, as vlm-rl-training does.

    Prints the outputs as JSON on stdout. Examples: fovea workflow vlm-rl-training --input '{"env_name": "geospot",
    "total_steps": 10000}'; fovea workflow vlm-rl-training --input '{"resume_checkpoint":
    "runs/geospot/checkpoints/step-5000", "total_steps": 50000}' (docs/workflows.md has all inputs).
    """
    with one_line_errors(debug=debug):
        inputs = read_inputs(TrainingInputs, source)
        from fovea.utils.malloc import tune_allocators

        tune_allocators()
        from fovea.workflows.training import train

        with redirect_stdout(sys.stderr):
            outputs = train(inputs, trust=trust)
    _print_json(outputs.to_json())


@app.command("vlm-rl-eval")
def vlm_rl_eval(source: Source, trust: Trust = False, debug: Debug = False) -> None:
    """Evaluate as vlm-rl-eval does.

    Prints the outputs as JSON on stdout. Example: fovea workflow vlm-rl-eval --input '{"env_name": "geospot",
    "trained_model": "runs/geospot", "baseline_model": "Qwen/Qwen2-VL-7B-Instruct", "num_episodes": 100}'
    (docs/workflows.md has all inputs).
    """
    with one_line_errors(debug=debug):
        inputs = read_inputs(EvaluationInputs, source)
        from fovea.utils.malloc import tune_allocators

        tune_allocators()
        from fovea.workflows.evaluation import evaluate

        with redirect_stdout(sys.stderr):
            outputs = evaluate(inputs, trust=trust)
    _print_json(outputs.to_json())


def _print_json(outputs: dict[str, Any]) -> None:
    typer.echo(json.dumps(outputs, indent=2, allow_nan=False))
