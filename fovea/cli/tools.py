"""The commands of `tools/fovea_tools/`: plan, workflows and reproduce. Imports are deferred, as in `main.py`."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

from fovea.cli.texts import WIDTH, Debug, Trust, Words, one_line_errors, sort_words
from fovea.config.loading import load_config
from fovea_gym.errors import ConfigError
from fovea_tools.importer.reading import read, system_of, where_of
from fovea_tools.importer.source import EnvironmentName
from fovea_tools.importer.translate import recipe_text, translate
from fovea_tools.published.catalogue import PublishedResult, find_result, published_results
from fovea_tools.workflows.inputs import EvaluationInputs, TrainingInputs, read_inputs


def complete_result(incomplete: str) -> list[str]:
    """The published results by name that a word may become."""
    return [name for name in published_results() if name.startswith(incomplete)]


def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="A result that --list names.", autocompletion=complete_result)
    ] = None,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="RECIPE|KEY=VALUE", help="Recipes and settings that win over theirs.")
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the published results.")] = False,
    debug: Debug = False,
) -> None:
    """Train by the settings of a published result, and compare.

    Fetches the rows or says how to get them, trains on all GPUs of this machine, evaluates, and writes one page: the
    published figure, ours with its interval, the curves, and every setting that differs. Called again, it goes on.
    Examples: fovea reproduce --list; fovea reproduce easyr1_geo3k_7b; fovea reproduce easyr1_geo3k_7b tiny max_steps=2,
    to try it on a CPU.
    """
    with one_line_errors(debug=debug):
        if show_list:
            typer.echo("\n".join(map(_listed, published_results().values())))
            return
        if name is None:
            raise ConfigError("no result named; write fovea reproduce NAME; `fovea reproduce --list` has the names")
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


def plan(
    words: Words = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, sizes in bytes.")] = False,
    debug: Debug = False,
) -> None:
    """Tell what a step needs in memory and time.

    By part and GPU, with traffic and FLOPs, for a recipe on a machine.
    Reads the model's config.json and no weights. What does not fit ends with exit code 1, and says which setting to
    change to what. Example: fovea plan geo3k plan.gpus=8 plan.gpu=h100 (docs/plan.md).
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


def import_config(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE|KEY=VALUE", help="YAML, a shell script or words; settings win over files."),
    ] = None,
    system: Annotated[
        Literal["verl", "rlinf"] | None, typer.Option(help="Whose settings they are, where these do not tell.")
    ] = None,
    environment: Annotated[
        EnvironmentName | None, typer.Option(help="Environment of the rows; settings of verl do not name one.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="RECIPE", help="Write a new file; default: stdout.")] = None,
    debug: Debug = False,
) -> None:
    """Make a recipe of settings of verl or RLinf.

    Settings with a counterpart are converted, units included, the other system's defaults too; a comment behind each
    says where it comes from. The rest is listed with reasons, and settings that contradict each other are an error.
    Examples: fovea import-config run_qwen2_5_vl-7b.sh --environment geo3k; fovea import-config
    qwen3-vl-2b-grpo-fsdp-geo3k.yaml runner.max_steps=750 --out mine.yaml. The whole table:
    python -m fovea_tools.importer.docs verl.
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
            raise ConfigError(f"{out}: there is such a file; give another --out")
        else:
            out.write_text(text, encoding="utf-8")
        lost = len(translation.left) + len(translation.unknown)
        typer.echo(f"{len(translation.lines)} settings; {lost} left out, with reasons at the head", err=True)


def _count_gpus() -> int:
    # most imports need no torch, whose import takes seconds
    import torch

    return torch.cuda.device_count()


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
        _print_outputs("train", read_inputs(TrainingInputs, source), trust=trust)


@app.command("vlm-rl-eval")
def vlm_rl_eval(source: Source, trust: Trust = False, debug: Debug = False) -> None:
    """Evaluate as vlm-rl-eval does.

    Prints the outputs as JSON on stdout. Example: fovea workflow vlm-rl-eval --input '{"env_name": "geospot",
    "trained_model": "runs/geospot", "baseline_model": "Qwen/Qwen2-VL-7B-Instruct", "num_episodes": 100}'
    (docs/workflows.md has all inputs).
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
