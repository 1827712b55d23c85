"""Options and words that several commands have, spelled, explained and completed the same in each."""

from __future__ import annotations

import re
import select
import shlex
import shutil
import sys
import textwrap
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple, TypeAlias

import typer

from fovea.config.describe import Setting, describe
from fovea.config.recipes import find_recipe, recipes_folder, shipped_recipes
from fovea_gym.errors import ConfigError, DataError, FoveaError, SeveralErrors
from fovea_gym.utils.shown_text import printable, without_secrets

Debug: TypeAlias = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Trust: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Run the reward function or environment that a folder's own settings name, ask their judge, and read "
        "Megatron's checkpoints (a run of yours).",
    ),
]
Quiet: TypeAlias = Annotated[bool, typer.Option("--quiet", "-q", help="Print results and errors only.")]
_ARGUMENT = re.compile(r"(?<![\w.])(?:(trust)=True|(recipe|api_key_env)=([\w./-]+))")
"""An argument of a Python function, as errors name it that both the functions and the commands have."""


def with_options(text: str) -> str:
    """The text with options of the command line, as `--recipe FILE`, in place of arguments of Python functions."""
    return _ARGUMENT.sub(lambda at: f"--{at[1]}" if at[1] else f"--{at[2].replace('_', '-')} {at[3]}", text)


def _reader_has_gone() -> bool:
    watched = select.poll()
    watched.register(sys.stdout, select.POLLOUT)
    return any(events & select.POLLERR for _, events in watched.poll(0))


@contextmanager
def one_line_errors(*, debug: bool = False) -> Iterator[None]:
    """Turn Fovea's errors, those of files (exit code 2) and Ctrl-C (130) into one line; `debug` adds the traceback.

    A reader of stdout that has gone, such as `head`, ends the command without a message.
    """
    try:
        yield
    except FoveaError as error:
        if debug:
            traceback.print_exc()
        for each in error.errors if isinstance(error, SeveralErrors) else [error]:
            line = printable(without_secrets(with_options(" ".join(str(each).split()))))
            typer.echo(f"error: {line}", err=True)
        raise typer.Exit(error.exit_code) from None
    except OSError as error:  # a full disk, a folder without permission
        if isinstance(error, BrokenPipeError) and _reader_has_gone():
            raise  # typer ends the command
        if debug:
            traceback.print_exc()
        line = printable(without_secrets(f"{error.filename or 'a file'}: {error.strerror or error}"))
        typer.echo(f"error: {line}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt as stop:
        if debug:
            traceback.print_exc()
        reason = f"; {stop}" if str(stop) else ""
        typer.echo(f"stopped by Ctrl-C{reason}", err=True)
        raise typer.Exit(130) from None


def after_training(run: Path, *, trust: bool) -> str:
    """Commands for a finished run, a line each; with `trust`, those that open its model name that option."""
    fovea, folder = typed_command(), shlex.quote(str(run))
    option = " --trust" if trust else ""
    exported = shlex.quote(str(Path("exported", run.name)))
    return "\n".join(
        (
            "next:",
            f"  {fovea} view {folder}",
            f"  {fovea} eval {folder} majority --html eval.html{option}",
            f"  {fovea} export {folder} --out {exported}{option}",
        )
    )


def typed_command() -> str:
    """The command of this process without its arguments: `fovea`, `.venv/bin/fovea` or `python -m fovea`."""
    program = sys.argv[0]
    if Path(program).suffix == ".py":
        return f"{shlex.quote(sys.executable)} -m fovea"
    return "fovea" if program == shutil.which("fovea") else shlex.quote(program)


RUNS = Path("runs")
"""The folder of runs by default (run_dir)."""
CHOICES = re.compile(r"[\w.+-]+(?: \| [\w.+-]+)+|true or false")
"""The type of a setting that takes one of a few words."""
ONE_WORD = re.compile(r"[\w.+-]+")


def complete_word(ctx: typer.Context, incomplete: str) -> list[str]:
    """The recipes by name that a word may become, and the settings, with their `=` and the values of choices."""
    before = [str(word) for word in ctx.params.get("words") or []]
    # bash takes `=` for a separate word
    names = before[:-1] if before[-1:] == ["="] else before
    table = {each.key: each for each in reversed(describe())}
    if names and names[-1] in table:
        return [value for value in _choices(table[names[-1]]) if value.startswith(incomplete)]
    key, equals, _ = incomplete.partition("=")
    found = [each for each in describe() if (each.key == key if equals else each.key.startswith(key))]
    keys = list(dict.fromkeys(f"{each.key}=" for each in found if not equals))
    # bash and zsh put a space behind the only word there is, but none behind what several have in common
    values = [f"{found[0].key}={value}" for value in _choices(found[0], "VALUE")] if found and len(keys) < 2 else []
    return [*complete_recipe(incomplete), *keys, *(word for word in values if word.startswith(incomplete))]


def _choices(setting: Setting, otherwise: str | None = None) -> list[str]:
    """Words that a setting may be set to. With `otherwise`, one without choices gives its default, else `otherwise`."""
    if CHOICES.fullmatch(setting.type):
        return re.split(r" \| | or ", setting.type)
    if otherwise is None:
        return []
    return [setting.default if ONE_WORD.fullmatch(setting.default) else otherwise]


def complete_recipe(incomplete: str) -> list[str]:
    """The recipes by name that a word may become."""
    return [name for name in shipped_recipes() if name.startswith(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """The run folders below runs/ that a word may become."""
    found = (str(file.parent) for file in sorted(RUNS.glob("*/config.yaml")))
    return [folder for folder in found if folder.startswith(incomplete)]


SCHEMA_COMMENT = "# yaml-language-server:"
"""Start of the line of a recipe that names its JSON schema, by which an editor completes and checks it."""
NEEDS = "# Needs: "
"""Start of the line in the head of a recipe that says what it takes."""
NEEDS_ANOTHER = re.compile(r"(another recipe|\S+) before it")
"""Start of the `Needs:` line of a recipe that only extends another one."""
SENTENCE = re.compile(r".*?[.](?=\s|$)")
WIDTH = 110


class Described(NamedTuple):
    """The first sentence of a recipe's head, and what it needs."""

    text: str
    needs: str


def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this recipe's file.", metavar="[NAME]")] = None,
    debug: Debug = False,
) -> None:
    """List the recipes that come with Fovea.

    Every command that takes a recipe's file takes such a name. Examples: fovea train shapes; fovea recipes shapes >
    mine.yaml, to change a copy.
    """
    with one_line_errors(debug=debug):
        if name is None:
            typer.echo("\n".join(_listed(each, describe_recipe(file)) for each, file in shipped_recipes().items()))
            typer.echo(
                f"\nrun one: fovea train NAME [KEY=VALUE]...; see one: fovea recipes NAME\nfiles: {recipes_folder()}"
            )
        else:
            typer.echo(_text_of(name), nl=False)


def describe_recipe(file: Path) -> Described:
    """Parse the comment at the head of a recipe; DataError if its `Needs:` line is missing."""
    lines = file.read_text(encoding="utf-8").splitlines()
    needs = [line.removeprefix(NEEDS) for line in lines if line.startswith(NEEDS)]
    comments = [line for line in lines if line.startswith("#") and not line.startswith(SCHEMA_COMMENT)]
    head = " ".join(line.removeprefix("#").strip() for line in comments)
    sentence = SENTENCE.match(head)
    if not needs or sentence is None:
        raise DataError(f"{file}: its head lacks a sentence or a line `{NEEDS}...`; write both")
    return Described(sentence.group(), needs[0])


def _listed(name: str, described: Described) -> str:
    shown = (f"{name:<20}{described.text}", f"{'':<20}needs {described.needs}")
    return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent=" " * 20) for line in shown)


def _text_of(name: str) -> str:
    shipped = shipped_recipes()
    if name not in shipped:
        raise DataError(f"{name}: no recipe that comes with Fovea; there are {', '.join(shipped)}")
    return shipped[name].read_text(encoding="utf-8")


WORDS_HELP = (
    "YAML files of settings, or names that `fovea recipes` lists (later ones win), and single settings, which win over "
    "them; values are YAML."
)

OPTIONS: Mapping[str, str] = {
    "train": "--dry-run[=full], --quiet, --debug and --help",
    "plan": "--json, --debug and --help",
    "doctor": "--gpu, --cpu, --families, --debug and --help",
    "reproduce": "--list, --debug and --help",
}
"""Options of the commands that take what begins with a dash for a word."""

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="RECIPE|KEY=VALUE", help=WORDS_HELP, autocompletion=complete_word),
]


def sort_words(words: list[str], command: str = "train") -> tuple[list[Path], list[str]]:
    """The words split into recipes and overrides; ConfigError, with the likely intent, for a word that is neither."""
    recipes, overrides = [], []
    for word in words:
        key, equals, _ = word.partition("=")
        if word.startswith("-") and is_key(bare_key(word)):
            value = word.partition("=")[2] or "VALUE"
            raise ConfigError(f"{word}: settings have no dashes; write {bare_key(word)}={value}")
        if word.startswith("-"):
            raise ConfigError(
                f"{word}: no such option; there are {OPTIONS[command]}, and settings are written key=value"
            )
        if equals and "/" not in key and not Path(word).is_file():  # a path may hold `=`
            overrides.append(word)
        elif not is_recipe(word) and is_key(word):
            raise ConfigError(f"{word}: a setting without a value; write {word}=VALUE")
        else:
            recipes.append(find_recipe(word))
    if not recipes:
        raise ConfigError(f"no recipe given; write fovea {command} shapes [KEY=VALUE]...")
    first, name = recipes[0], recipes[0].stem
    is_shipped = first.resolve() in shipped_recipes().values()
    if is_shipped and (another := NEEDS_ANOTHER.match(describe_recipe(first).needs)):
        before = "vqa" if another[1] == "another recipe" else another[1]
        raise ConfigError(f"{name}: this recipe changes the one before it; write fovea {command} {before} {name}")
    return recipes, overrides


def bare_key(word: str) -> str:
    return word.lstrip("-").partition("=")[0]


def is_recipe(word: str) -> bool:
    """True if a word is written as a file is, or is the name of a file or of a recipe that comes with Fovea."""
    return "/" in word or word.endswith((".yaml", ".yml")) or Path(word).is_file() or word in shipped_recipes()


def is_key(word: str) -> bool:
    try:
        return bool(describe(word))
    except ConfigError:
        return False
