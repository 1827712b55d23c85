"""`fovea workflow NAME`: run a published workflow of mixtrain. Torch is imported when the command runs."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from typing import Annotated, TypeAlias

import typer

from fovea.cli.texts import Debug, Trust, one_line_errors
from fovea_tools.workflows.inputs import EvaluationInputs, TrainingInputs, read_inputs

Source: TypeAlias = Annotated[
    str, typer.Option("--input", metavar="FILE|JSON", help="Inputs as a JSON object, or a file that contains one.")
]

app = typer.Typer(
    help="Run a published workflow of mixtrain.", no_args_is_help=True, add_completion=False, rich_markup_mode=None
)


@app.command("vlm-rl-training")
def vlm_rl_training(source: Source = "{}", trust: Trust = False, debug: Debug = False) -> None:
    """Train with PPO, as vlm-rl-training does.

    Prints the outputs as JSON on stdout. Examples: fovea workflow vlm-rl-training --input '{"env_name": "geospot",
    "total_steps": 10000}'; fovea workflow vlm-rl-training --input '{"resume_checkpoint":
    "runs/geospot/checkpoints/step-5000", "total_steps": 50000}' (docs/workflows.md lists all inputs).
    """
    with one_line_errors(debug=debug):
        _print_outputs("train", read_inputs(TrainingInputs, source), trust=trust)


@app.command("vlm-rl-eval")
def vlm_rl_eval(source: Source, trust: Trust = False, debug: Debug = False) -> None:
    """Evaluate as vlm-rl-eval does.

    Prints the outputs as JSON on stdout. Example: fovea workflow vlm-rl-eval --input '{"env_name": "geospot",
    "trained_model": "runs/geospot", "baseline_model": "Qwen/Qwen2-VL-7B-Instruct", "num_episodes": 100}'
    (docs/workflows.md lists all inputs).
    """
    with one_line_errors(debug=debug):
        _print_outputs("evaluate", read_inputs(EvaluationInputs, source), trust=trust)


def _print_outputs(function: str, inputs: TrainingInputs | EvaluationInputs, *, trust: bool) -> None:
    from fovea.utils.malloc import tune_allocators

    tune_allocators()
    from fovea_tools.workflows import training

    with redirect_stdout(sys.stderr):
        outputs = getattr(training, function)(inputs, trust=trust).to_json()
    typer.echo(json.dumps(outputs, indent=2, allow_nan=False))
