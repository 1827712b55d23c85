"""The `fovea` command line; `data`, `eval`, `export` and `grade` have files of their own.

Commands import what they run inside their functions: importing torch takes seconds, and `--help` must not wait for it.
Besides cli/, only build/ may do so (tests/test_imports.py checks it).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fovea import __version__
from fovea.cli.completion import complete_setting
from fovea.cli.data import app as data_app
from fovea.cli.doctor import check_parity, findings, probe
from fovea.cli.errors import one_line_errors
from fovea.cli.eval import evaluate
from fovea.cli.export import export
from fovea.cli.grade import grade
from fovea.cli.next_commands import after_training
from fovea.cli.options import Debug, Quiet
from fovea.config.base import MAY_CHANGE
from fovea.config.describe import describe
from fovea.config.loading import dropped_settings, dump_config, load_config
from fovea.config.type_text import show
from fovea.errors import ConfigError, DataError
from fovea.utils.launch import is_worker

HELP = ["-h", "--help"]

app = typer.Typer(
    name="fovea",
    help="Post-train vision-language models by reinforcement learning.",
    epilog="Start with `fovea train recipes/shapes.yaml`; `fovea config` lists every setting.",
    no_args_is_help=True,
    context_settings={"help_option_names": HELP},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(data_app, name="data")

app.command("eval")(evaluate)
app.command()(export)
app.command()(grade)

WORDS_HELP = "YAML files of settings (later ones win), and single settings, which win over files; values are YAML."

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="RECIPE|KEY=VALUE", help=WORDS_HELP, autocompletion=complete_setting),
]


def main() -> None:
    """Run the command of this process's arguments."""
    # a notebook hands its own backend on to what a cell starts, and matplotlib refuses one that is not installed here
    os.environ["MPLBACKEND"] = "agg"
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fovea {__version__}")
        raise typer.Exit()


@app.callback()
def fovea(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Post-train vision-language models by reinforcement learning."""


@app.command(
    add_help_option=False,  # our own --help also explains the keys given with it
    context_settings={"ignore_unknown_options": True},  # so that --rollout.top_p=1 gets our error message
    epilog="`fovea config` lists every KEY with type, default and meaning; `fovea config rollout` a section.",
)
def train(
    context: typer.Context,
    words: Words = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check settings, rows, reward and model files; train and write nothing.")
    ] = False,
    quiet: Quiet = False,
    debug: Debug = False,
    show_help: Annotated[
        bool, typer.Option(*HELP, help="Show this message, or explain the KEYs given with it.")
    ] = False,
) -> None:
    """Train a model with the settings of a recipe.

    Examples: fovea train recipes/shapes.yaml seed=1 warmup=null; fovea train recipes/geo3k.yaml
    model.path=models/Qwen3-VL-2B-Instruct 'environment.train_files=[train.parquet]'.
    """
    with one_line_errors(debug=debug):
        if show_help:
            keys = [key for key in map(_bare_key, words or []) if not _is_path(key) and (_is_key(key) or "." in key)]
            typer.echo("\n".join(map(explain, keys)) if keys else context.get_help())
            return
        if is_worker():
            if dry_run:
                return  # the driver alone checks, and calls no worker
            from fovea.build.workers import serve_driver

            return serve_driver()
        recipes, overrides = sort_words(words or [])
        config = load_config(recipes, [*overrides, *(["log.progress=false"] if quiet else [])])
        _say_dropped(recipes, overrides)
        if dry_run:
            from fovea.build.dry_run import plan

            typer.echo("\n".join(plan(config)))
            return
        from fovea.build.run import build
        from fovea.loop import train as train_run
        from fovea.utils.malloc import keep_freed_memory

        keep_freed_memory()
        run = build(config)
        train_run(run)
        if config.log.progress:
            typer.echo(after_training(run.folder))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder; the run may still be going.")],
    debug: Debug = False,
) -> None:
    """Write report.html (and the reward curve) of a run."""
    with one_line_errors(debug=debug):
        if not run.is_dir():
            raise DataError(f"{run}: no such run folder; `fovea train` prints the folder of a run (run_dir)")
        from fovea.report.html import CONFIG_FILE, write_report

        if not (run / CONFIG_FILE).is_file():
            raise DataError(
                f"{run}: no run folder, since it holds no {CONFIG_FILE}; `fovea train` prints that of a run"
            )
        typer.echo(write_report(run))


@app.command()
def config(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PREFIX|RECIPE|KEY=VALUE",
            help="Keys or sections, such as rollout; recipes and settings as for train.",
            autocompletion=complete_setting,
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """List every setting, or show the resolved settings of a recipe.

    Settings are listed with type, default and meaning; those of a recipe are YAML. Examples: fovea config rollout;
    fovea config recipes/shapes.yaml algorithm.name=gspo; the same followed by `algorithm`, for that section alone.
    """
    with one_line_errors(debug=debug):
        prefixes = [word for word in words or [] if not _is_path(word) and "=" not in word]
        if words and len(prefixes) < len(words):
            recipes, overrides = sort_words([word for word in words if word not in prefixes], command="config")
            typer.echo(dump_config(load_config(recipes, overrides), prefixes), nl=False)
            _say_dropped(recipes, overrides)
        else:
            typer.echo("\n".join(explain(prefix) for prefix in prefixes or [""]))


@app.command(context_settings={"ignore_unknown_options": True})
def doctor(
    words: Words = None,
    debug: Debug = False,
) -> None:
    """Show versions, devices and what is missing; check a recipe's parity.

    The parity gate samples completions with the recipe's engine and compares their log-probs with the trainer's: exit
    code 1 when they differ by more than parity.max_abs_logprob_diff. Nothing is written to the run folder.
    """
    with one_line_errors(debug=debug):
        sorted_words = sort_words(words, command="doctor") if words else None
        typer.echo("checking (this imports torch) ...", err=True)
        found = probe()
        for name, text in findings(found).items():
            typer.echo(f"{name:<14}{text}")
        passed = not found.broken and (sorted_words is None or check_parity(*sorted_words))
    if not passed:
        raise typer.Exit(1)


def _say_dropped(recipes: list[Path], overrides: list[str]) -> None:
    dropped = dropped_settings(recipes, overrides)
    if dropped:
        listed = ", ".join(f"{key}={show(value)}" for key, value in dropped.items())
        typer.echo(f"settings of the recipe that another choice dropped: {listed}", err=True)


def explain(prefix: str) -> str:
    """Help text of the settings at or below `prefix`, two lines each."""
    return "\n".join(
        f"{each.key} = {each.default}    ({each.type}{f'; {MAY_CHANGE}' if each.may_change else ''})\n    {each.doc}"
        for each in describe(prefix)
    )


def sort_words(words: list[str], command: str = "train") -> tuple[list[Path], list[str]]:
    """The words split into recipes and overrides; ConfigError, with the likely intent, for a word that is neither."""
    recipes, overrides = [], []
    for word in words:
        key, equals, _ = word.partition("=")
        if word.startswith("-"):
            raise ConfigError(_no_option(word))
        if equals and "/" not in key and not Path(word).is_file():  # a path may hold `=`
            overrides.append(word)
        elif not _is_path(word) and _is_key(word):
            raise ConfigError(f"{word}: a setting without a value; write {word}=VALUE")
        else:
            recipes.append(Path(word))
    if not recipes:
        raise ConfigError(f"no recipe given; write fovea {command} recipes/shapes.yaml [KEY=VALUE]...")
    return recipes, overrides


def _no_option(word: str) -> str:
    key = _bare_key(word)
    if _is_key(key):
        value = word.partition("=")[2] or "VALUE"
        return f"{word}: settings have no dashes; write {key}={value}"
    return (
        f"{word}: no such option; there are --dry-run, --quiet, --debug and --help, and settings are written key=value"
    )


def _bare_key(word: str) -> str:
    return word.lstrip("-").partition("=")[0]


def _is_path(word: str) -> bool:
    return "/" in word or word.endswith((".yaml", ".yml")) or Path(word).is_file()


def _is_key(word: str) -> bool:
    try:
        return bool(describe(word))
    except ConfigError:
        return False


if __name__ == "__main__":
    main()
