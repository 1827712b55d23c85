"""The `fovea` command line: the table of its commands, and the commands without a separate file.

Commands import what they run inside their functions: importing torch takes seconds, and `--help` must not wait for it.
tests/test_imports.py lists where else this is done.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from fovea import __version__
from fovea.cli.cluster import app as cluster_app
from fovea.cli.doctor import check_parity, findings, probe
from fovea.cli.evaluate import evaluate, export, grade, serve
from fovea.cli.texts import (
    Debug,
    Quiet,
    Words,
    after_training,
    bare_key,
    complete_run,
    complete_word,
    is_key,
    is_recipe,
    one_line_errors,
    recipes,
    sort_words,
)
from fovea.config.describe import describe, is_choice
from fovea.config.loading import dropped_settings, dump_config, load_config, load_run_config
from fovea.config.run import Config
from fovea.config.schema import recipe_schema
from fovea.run.supervisor import end_with, is_supervised, supervise
from fovea.utils.installing import load_tool
from fovea.utils.torchrun import check_torchrun, is_worker, num_processes
from fovea_gym.errors import ConfigError
from fovea_gym.settings.base import MAY_CHANGE, leaves
from fovea_gym.settings.type_text import show
from fovea_gym.utils import entry_points

HELP = ["-h", "--help"]

COMMANDS = "fovea.commands"
"""Entry points through which other packages add commands: a function, or a `typer.Typer`."""
DOCTOR = "fovea.doctor"
"""Entry points of the checks of `fovea doctor` that are in the fovea-tools package."""


class PackageCommand(TyperCommand):
    """A command from another package (or from fovea-tools), which is imported when the command runs."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Make the context of the package's own command."""
        name = str(self.name)
        with one_line_errors():
            if isinstance(IN_ORDER_OF_USE.get(name), str):
                found = load_tool(COMMANDS, name, f"fovea {name}")
            else:
                found = entry_points.load(COMMANDS, name, IN_ORDER_OF_USE)
        added = found if isinstance(found, typer.Typer) else typer.Typer()
        if added is not found:
            added.command(context_settings={"help_option_names": HELP})(found)
        return typer.main.get_command(added).make_context(info_name, args, parent, **extra)


class InOrderOfUse(TyperGroup):
    """Fovea's commands in the order of use, and then those from other packages."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all commands."""
        added = sorted({*entry_points.registered(COMMANDS)} - {*IN_ORDER_OF_USE})
        return [*IN_ORDER_OF_USE, *added]

    def invoke(self, ctx: Any) -> Any:
        """Run the command; the prefix that pydantic adds is removed from typer's error about a value."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name; None for an unknown one."""
        added = entry_points.registered(COMMANDS).get(cmd_name)
        if added is None or isinstance(IN_ORDER_OF_USE.get(cmd_name), str):
            return super().get_command(ctx, cmd_name)
        packages = " and ".join(map(entry_points.package_of, added))
        return PackageCommand(name=cmd_name, callback=None, help=f"A command of the package {packages}.")


app = typer.Typer(
    cls=InOrderOfUse,
    name="fovea",
    help="Post-train vision-language models by reinforcement learning.",
    epilog="Start with `fovea train shapes`; `fovea recipes` lists recipes, `fovea config` every setting.",
    no_args_is_help=True,
    context_settings={"help_option_names": HELP},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command in this process's arguments."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fovea {__version__}")
        raise typer.Exit()


@app.callback()
def fovea(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Post-train vision-language models by reinforcement learning."""
    if num_processes() <= 1 or context.invoked_subcommand == "train":
        return
    if is_worker():
        raise typer.Exit(ConfigError.exit_code)  # the first process prints the message
    with one_line_errors():
        raise ConfigError(
            f"torchrun has started {num_processes()} processes (WORLD_SIZE), each of which would run all of `fovea "
            f"{context.invoked_subcommand}`; only `fovea train` shares its work among them: run this without "
            "torchrun"
        )


class TrainCommand(TyperCommand):
    """`fovea train`, whose `--dry-run` takes a value only after `=`; a word after a space is a recipe or setting."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words with `--dry-run` expanded to `--dry-run=sample`."""
        return super().parse_args(ctx, ["--dry-run=sample" if word == "--dry-run" else word for word in args])


def train(
    context: typer.Context,
    words: Words = None,
    dry_run: Annotated[
        Literal["sample", "full"] | None,
        typer.Option(
            metavar="[=full]",
            help="Check settings, reward, model files and a sample of rows (=full: all rows); train nothing.",
        ),
    ] = None,
    quiet: Quiet = False,
    debug: Debug = False,
    supervised_by: Annotated[int | None, typer.Option(hidden=True)] = None,
    spent_seconds: Annotated[float, typer.Option(hidden=True)] = 0.0,
    show_help: Annotated[
        bool, typer.Option(*HELP, help="Show this message, or explain the KEYs given with it.")
    ] = False,
) -> None:
    """Train a model with the settings of a recipe.

    Examples: fovea train shapes seed=1 warmup=null; fovea train my_recipe.yaml
    model.path=models/Qwen3-VL-2B-Instruct 'environment.train_files=[train.parquet]'.
    """
    with one_line_errors(debug=debug):
        if show_help:
            keys = [key for key in map(bare_key, words or []) if not is_recipe(key) and (is_key(key) or "." in key)]
            typer.echo("\n".join(map(explain, keys)) if keys else context.get_help())
            return
        check_torchrun()
        if is_worker():
            if dry_run:
                return  # only the driver checks, without its workers
            from fovea.wiring.workers import serve_driver

            return serve_driver()
        recipes, overrides = sort_words(words or [])
        config = load_run_config(recipes, [*overrides, *(["log.progress=false"] if quiet else [])])
        if supervised_by is not None:
            end_with(supervised_by)
        elif is_supervised(config) and not dry_run:
            flags = [flag for flag, is_set in {"--quiet": quiet, "--debug": debug}.items() if is_set]
            raise typer.Exit(supervise(config, [*flags, *(words or [])]))
        _say_dropped(recipes, overrides)
        if dry_run:
            from fovea.commands.dry_run import NUM_OPENED, plan

            typer.echo("\n".join(plan(config, rows_per_split=NUM_OPENED if dry_run == "sample" else None)))
            return
        _train(config, spent_seconds)


def _train(config: Config, spent_seconds: float) -> None:
    """Train, and print what to do next; `spent_seconds` is from earlier attempts."""
    from fovea.utils.malloc import tune_allocators, use_expandable_segments

    tune_allocators()
    if config.expands_segments:
        use_expandable_segments()
    from fovea.commands.trust import wants_trust
    from fovea.loop import train as run_steps
    from fovea.wiring.run import build

    run = replace(build(config), spent_seconds=spent_seconds)
    run_steps(run)
    if config.log.progress:
        typer.echo(after_training(run.folder, trust=wants_trust(config)))


def view(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Run folders, also of unfinished runs; two are compared. Or one folder of runs.",
            autocompletion=complete_run,
        ),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0: any free port.")] = 8377,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the page into one HTML file that opens without a server."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Watch runs on a local web page.

    It shows live curves; prompts, images and answers of the recorded steps with rewards and advantages, token by token;
    answers to held-out rows; settings and console. For a folder of runs it shows a list of them.
    Only this machine can open the page; from elsewhere, forward its port (ssh -L 8377:127.0.0.1:8377 HOST).
    Examples: fovea view runs; fovea view runs/latest; fovea view runs/grpo --export page.html (docs/view.md).
    """
    with one_line_errors(debug=debug):
        from fovea.report.about import check_run_folder
        from fovea.report.export import check_export
        from fovea.report.export import export as export_page
        from fovea.report.viewed_run import PAGE_SECONDS, ViewedRun
        from fovea.view.list_app import make_list_app
        from fovea.view.run_list import is_folder_of_runs
        from fovea.view.server import make_app, serve

        if export is None and len(runs) == 1 and is_folder_of_runs(runs[0]):
            app = make_list_app(runs[0])
        else:
            for run in runs:
                check_run_folder(run)
            if export is not None:
                check_export(export)
                typer.echo(export_page(list(map(ViewedRun, runs)), export))
                return
            app = make_app([ViewedRun(run, PAGE_SECONDS) for run in runs])
        serve(app, port, lambda address: typer.echo(f"{address} (Ctrl-C ends it)"))


def report(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="A run folder; the run may be unfinished.", autocompletion=complete_run),
    ],
    debug: Debug = False,
) -> None:
    """Write the report.html of a run again.

    `fovea train` writes it at the end of a run.
    """
    with one_line_errors(debug=debug):
        from fovea.report.about import check_run_folder
        from fovea.report.export import write_report

        check_run_folder(run)
        typer.echo(write_report(run))


def config(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PREFIX|RECIPE|KEY=VALUE",
            help="Keys or sections, such as rollout; recipes and settings as for train.",
            autocompletion=complete_word,
        ),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of recipes, with which editors complete them.")
    ] = False,
    debug: Debug = False,
) -> None:
    """List all settings, or show those of a recipe.

    Settings are listed with type, default and meaning; those of a recipe are printed as YAML. Examples: fovea config
    rollout; fovea config rollout.engine=vllm, for the settings of that engine; fovea config shapes algorithm.name=gspo;
    the same followed by `algorithm`, for only that section.
    """
    with one_line_errors(debug=debug):
        if schema:
            if words:
                raise ConfigError(f"--schema prints the schema of all recipes, not of {words[0]}; leave one out")
            for group in entry_points.PARTS:
                for name in entry_points.registered(group):
                    entry_points.load(group, name)
            typer.echo(json.dumps(recipe_schema(), indent=1, ensure_ascii=False))
            return
        shown = any(map(is_recipe, words or []))
        prefixes = [
            word for word in words or [] if not is_recipe(word) and ("=" not in word or (not shown and is_choice(word)))
        ]
        if words and len(prefixes) < len(words):
            recipes, overrides = sort_words([word for word in words if word not in prefixes], command="config")
            typer.echo(dump_config(load_config(recipes, overrides), prefixes), nl=False)
            _say_dropped(recipes, overrides)
        else:
            typer.echo("\n".join(explain(prefix) for prefix in prefixes or [""]))


def doctor(
    words: Words = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Check kernels, rates and links of the GPUs.")] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="With --gpu: run its checks on the CPU.")] = False,
    families: Annotated[bool, typer.Option("--families", help="Check and list the tested model types.")] = False,
    debug: Debug = False,
) -> None:
    """Show versions, devices and missing packages.

    With a recipe, the parity gate samples completions with its engine and compares their log-probs with the trainer's:
    exit code 1 if they differ by more than parity.max_abs_logprob_diff. Nothing is written to the run folder.
    With --gpu, the GPU is checked instead, and a recipe's speed on it is estimated (docs/gpu.md). With --families, tiny
    models of all tested types, or of the given types, are checked instead (docs/models.md).
    """
    with one_line_errors(debug=debug):
        if cpu and not gpu:
            raise ConfigError("--cpu runs the checks of --gpu on the CPU; add --gpu")
        if families:
            load_tool(DOCTOR, "families", "fovea doctor --families")(words)
            return
        sorted_words = sort_words(words, command="doctor") if words else None
        typer.echo("checking (this imports torch) ...", err=True)
        found = probe()
        lines = findings(found)
        width = max(map(len, lines)) + 2
        for name, text in lines.items():
            typer.echo(f"{name:<{width}}{text}")
        passed = not found.broken
        if passed and gpu:
            check_gpu = load_tool(DOCTOR, "gpu", "fovea doctor --gpu")  # this imports torch, which may be broken
            checked = None if sorted_words is None else load_config(*sorted_words)
            # print each line at once: a crash of a GPU driver ends the process
            passed = check_gpu(checked, lambda line: print(line, flush=True), on_cpu=cpu)
        elif passed and sorted_words is not None:
            passed = check_parity(*sorted_words)
    if not passed:
        raise typer.Exit(1)


def _say_dropped(recipes: list[Path], overrides: list[str]) -> None:
    dropped = dropped_settings(recipes, overrides)
    if dropped:
        now = leaves(load_config(recipes, overrides).model_dump(mode="json"))
        listed = ", ".join(
            f"{key}={show(value)}" + (f" (now {show(now[key])})" if key in now else "")
            for key, value in dropped.items()
        )
        typer.echo(f"settings of the recipe that were dropped by another choice: {listed}", err=True)


def explain(prefix: str) -> str:
    """Help text for the settings at or below `prefix`, two lines each."""
    return "\n".join(
        f"{each.key} = {each.default}    ({each.type}{f'; {MAY_CHANGE}' if each.may_change else ''})\n    {each.doc}"
        for each in describe(prefix)
    )


IN_ORDER_OF_USE: Mapping[str, Callable[..., None] | typer.Typer | str] = {
    "recipes": recipes,
    "train": train,
    "view": view,
    "report": report,
    "eval": evaluate,
    "saliency": "Show where a picture matters for an answer.",
    "export": export,
    "serve": serve,
    "config": config,
    "doctor": doctor,
    "plan": "Estimate the memory and time of a step.",
    "data": "Fetch or render a data set.",
    "reproduce": "Train with the settings of a published result, and compare.",
    "grade": grade,
    "import-config": "Make a recipe from settings of verl or RLinf.",
    "cluster": cluster_app,
    "workflow": "Run a published workflow of mixtrain.",
}
"""Every command, in the order in which a newcomer needs them; a text is the help of a command in fovea-tools."""
DASHED_WORDS = {"context_settings": {"ignore_unknown_options": True}}
"""For commands that accept words such as --rollout.top_p=1, for which Fovea has its own error message."""
TYPER_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "train": {
        **DASHED_WORDS,
        "cls": TrainCommand,
        "add_help_option": False,  # Fovea's own --help also explains the keys given with it
        "epilog": "`fovea config` lists every KEY with type, default and meaning; `fovea config rollout` one section.",
    },
    "doctor": DASHED_WORDS,
}
for name, command in IN_ORDER_OF_USE.items():
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    elif isinstance(command, str):
        app.command(name, cls=PackageCommand, help=command)(lambda: None)
    else:
        app.command(name, **TYPER_OPTIONS.get(name, {}))(command)


if __name__ == "__main__":
    main()
