"""The command `fovea eval`. Imports are deferred, because importing torch takes seconds."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from typing import Annotated, Literal

import typer

from fovea.cli.texts import Debug, Quiet, Trust, complete_recipe, complete_run, one_line_errors
from fovea.config.recipes import find_recipe, parse_override
from fovea_gym.errors import ConfigError
from fovea_gym.graders.by_name import Gradable
from fovea_gym.settings.base import Tree, over

TARGETS_HELP = (
    "A run, a checkpoint, a model folder or Hub id (ORG/NAME or ORG/NAME@REVISION), a server (http://HOST:PORT or "
    "http://HOST:PORT#MODEL, OpenAI-compatible), or a baseline: majority (the most "
    "frequent training answer, by question type), gold (the gold answer), constant:TEXT."
)
SETTING = re.compile(r"[A-Za-z_][\w.]*=")
BENCHMARK = re.compile(r"bench\w*(\.[\w.]*)?=")


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
        str | None, typer.Option(metavar="VARIABLE", help="Environment variable with the API key for servers.")
    ] = None,
    trust: Trust = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Evaluate targets on the same rows and compare them.

    Examples: fovea eval runs/shapes majority --html eval.html; fovea eval Qwen/Qwen3-VL-2B-Instruct runs/geo3k
    exported/geo3k evaluate.samples_per_prompt=8 rollout.temperature=0.8.

    Published benchmarks: fovea eval runs/geo3k bench=mathvista,mmmu bench.mathvista=PATH (docs/benchmarks.md).
    """
    with one_line_errors(debug=debug):
        targets, overrides = sort_words(words)
        from fovea.utils.malloc import tune_allocators

        tune_allocators()
        from fovea.commands.evaluate import EvalOptions, evaluate_targets

        options = EvalOptions(
            recipe=None if recipe is None else find_recipe(recipe),
            split=split,
            json_file=json_file,
            html_file=html_file,
            trust=trust,
            api_key_env=api_key_env,
            quiet=quiet,
        )
        if benchmarks := [word for word in overrides if BENCHMARK.match(word)]:
            if split != "test":
                raise ConfigError(f"--split {split}: benchmarks have only test rows; leave --split out")
            from fovea.commands.benchmarks import chosen, evaluate_benchmarks

            others = [word for word in overrides if word not in benchmarks]
            evaluate_benchmarks(targets, chosen(benchmarks), others, options)
        else:
            evaluate_targets(targets, overrides, options)


def sort_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Split the words into targets and settings; ConfigError without a target."""
    overrides = [word for word in words if SETTING.match(word) and not Path(word).exists()]
    targets = [word for word in words if word not in overrides]
    if not targets:
        raise ConfigError("no target given; name one before the settings, such as runs/shapes")
    return targets, overrides


def grade(
    env: Annotated[Gradable, typer.Argument(metavar="ENV", help="geo3k, vqa, caption, geospot, shapes or grounding.")],
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

    The graders are those of a run. `score` is the accuracy (geospot: the reward of the last stage), not the reward: the
    share for the form of an answer (environment.format_weight) is not included, but the form is among `parts`. Adds
    `score`, `parts` and `reason` to every row, and prints a summary: one line of JSON, which goes to stderr without
    --out, so that stdout holds only rows. A row that cannot be graded has the score null and is counted by reason. Exit
    code 2 if no row can be graded.
    """
    with one_line_errors(debug=debug):
        from fovea_gym.commands.grade import check_files, grade_file

        file = Path("/dev/stdin") if str(file) == "-" else file
        check_files(env, file, out)
        if out is None:
            summary = grade_file(env, file, lambda line: typer.echo(line, nl=False))
        else:
            with out.open("wb") as lines:
                summary = grade_file(env, file, lines.write)
        typer.echo(json.dumps(asdict(summary)), err=out is None)


WORDS_HELP = "Overrides of the run's settings, such as model.path=NEW/FOLDER or model.device=cpu."


def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|CHECKPOINT",
            help="A run folder (its newest checkpoint), or one checkpoint.",
            autocompletion=complete_run,
        ),
    ],
    words: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help=WORDS_HELP)] = None,
    *,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Output folder; new or empty.")],
    adapter_only: Annotated[
        bool,
        typer.Option("--adapter-only", help="Export the LoRA adapter in peft's format instead of the merged model."),
    ] = False,
    push: Annotated[
        str | None,
        typer.Option(metavar="ORG/NAME", help="Upload the folder to this Hub repository (a new one is private)."),
    ] = None,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Export a model as a verified Hugging Face folder.

    The export is loaded again, and its log-probs are compared with the checkpoint's. Example: fovea export
    runs/geo3k/checkpoints/step-500 --out exported/geo3k.
    """
    with one_line_errors(debug=debug):
        from fovea.commands.exporting.export import check_repo
        from fovea.commands.exporting.export import export as export_model
        from fovea.commands.exporting.export import push as push_folder

        if push is not None:
            check_repo(push)
        done = export_model(source, out, adapter_only=adapter_only, overrides=words or [], trust=trust)
        typer.echo(
            f"{done.folder}: loaded again, its log-probs differ from the checkpoint's by "
            f"at most {done.max_logprob_difference:.1e}"
        )
        if done.left_out:
            typer.echo(f"not exported (value function): {', '.join(done.left_out)}")
        if push is not None:
            typer.echo(push_folder(done.folder, push))


SERVER_WORDS_HELP = "Arguments of the engine, under the engine's names, such as max_model_len=8192 (vLLM)."


def serve(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|FOLDER", help="A run (its newest checkpoint, exported), a checkpoint, or a model folder."
        ),
    ],
    words: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help=SERVER_WORDS_HELP)] = None,
    *,
    host: Annotated[
        str, typer.Option(help="Address to listen on; an address that other machines can reach needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the model in requests; default: its folder's.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="VARIABLE", help="Environment variable with the key that requests must send.")
    ] = None,
    for_training: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Serve a trainer, which shares its weights through this common folder."),
    ] = None,
    engine: Annotated[Literal["vllm", "sglang"], typer.Option(help="Engine of the server to start.")] = "vllm",
    allow_urls: Annotated[
        bool, typer.Option("--allow-urls", help="Read images of requests from public http(s) URLs.")
    ] = False,
    allow_private_addresses: Annotated[
        bool, typer.Option("--allow-private-addresses", help="Also read images from this machine and its network.")
    ] = False,
    start_seconds: Annotated[float, typer.Option(min=1, help="Longest time to wait until the server answers.")] = 900.0,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Serve a model with an OpenAI-compatible API.

    Examples: fovea serve runs/geo3k; fovea serve exported/geo3k --port 8001 max_model_len=8192.
    """
    with one_line_errors(debug=debug):
        arguments = reduce(over, map(parse_override, words or []), Tree())
        if allow_private_addresses and not allow_urls:
            raise ConfigError("--allow-private-addresses applies only to images at URLs; add --allow-urls")
        from fovea.commands.serve import ServedModel, ServerAddress
        from fovea.commands.serve import serve as serve_model
        from fovea.rollout.server import LaunchesServers
        from fovea_gym.rows.access import UrlLimits

        launch: LaunchesServers
        # each engine is an optional extra
        if engine == "sglang":
            from fovea.rollout.sglang.server import launch
        else:
            from fovea.rollout.vllm.server import launch
        limits = UrlLimits(retries=0, allow_private_addresses=allow_private_addresses) if allow_urls else None
        served = ServedModel(
            source=source, name=name, arguments=arguments, weights_dir=for_training, url_limits=limits, trust=trust
        )
        address = ServerAddress(host=host, port=port, api_key_env=api_key_env)
        try:
            serve_model(served, address, launch, _say, start_seconds=start_seconds)
        except KeyboardInterrupt:
            _say("stopped")
            raise typer.Exit(130) from None


def _say(text: str) -> None:
    typer.echo(text)
    sys.stdout.flush()
