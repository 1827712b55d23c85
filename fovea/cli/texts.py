"""Options and arguments that several commands share, with the same spelling, help and completion in each."""

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
        help="Run the reward function or environment that a folder's own settings name, call their judge, and read "
        "Megatron's checkpoints. Use it only for your own runs.",
    ),
]
Quiet: TypeAlias = Annotated[bool, typer.Option("--quiet", "-q", help="Print only results and errors.")]
_ARGUMENT = re.compile(r"(?<![\w.])(?:(trust)=True|(recipe|api_key_env)=([\w./-]+))")
"""An argument of a Python function, as named in errors that functions and commands share."""


def with_options(text: str) -> str:
    """Replace arguments of Python functions in a text by command-line options such as `--recipe FILE`."""
    return _ARGUMENT.sub(lambda at: f"--{at[1]}" if at[1] else f"--{at[2].replace('_', '-')} {at[3]}", text)


def _reader_has_gone() -> bool:
    watched = select.poll()
    watched.register(sys.stdout, select.POLLOUT)
    return any(events & select.POLLERR for _, events in watched.poll(0))


@contextmanager
def one_line_errors(*, debug: bool = False) -> Iterator[None]:
    """Print Fovea's errors, file errors (exit code 2) and Ctrl-C (130) on one line; `debug` adds the traceback.

    If the reader of stdout has gone, as `head` may, the command ends without a message.
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
    except OSError as error:  # such as a full disk or a missing permission
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
    """Commands for a finished run, one per line; with `trust`, commands that open its model get --trust."""
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
"""The default folder of runs (run_dir)."""
CHOICES = re.compile(r"[\w.+-]+(?: \| [\w.+-]+)+|true or false")
"""The type of a setting that accepts one of a few words."""
ONE_WORD = re.compile(r"[\w.+-]+")


def complete_word(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completions of a word: names of recipes, and settings with `=` and the values of choices."""
    before = [str(word) for word in ctx.params.get("words") or []]
    # bash treats `=` as a separate word
    names = before[:-1] if before[-1:] == ["="] else before
    table = {each.key: each for each in reversed(describe())}
    if names and names[-1] in table:
        return [value for value in _choices(table[names[-1]]) if value.startswith(incomplete)]
    key, equals, _ = incomplete.partition("=")
    found = [each for each in describe() if (each.key == key if equals else each.key.startswith(key))]
    keys = list(dict.fromkeys(f"{each.key}=" for each in found if not equals))
    # bash and zsh add a space after a single completion, but none after the common start of several
    values = [f"{found[0].key}={value}" for value in _choices(found[0], "VALUE")] if found and len(keys) < 2 else []
    return [*complete_recipe(incomplete), *keys, *(word for word in values if word.startswith(incomplete))]


def _choices(setting: Setting, otherwise: str | None = None) -> list[str]:
    """Values for a setting. With `otherwise`, a setting without choices gives its default or else `otherwise`."""
    if CHOICES.fullmatch(setting.type):
        return re.split(r" \| | or ", setting.type)
    if otherwise is None:
        return []
    return [setting.default if ONE_WORD.fullmatch(setting.default) else otherwise]


def complete_recipe(incomplete: str) -> list[str]:
    """Names of recipes that complete a word."""
    return [name for name in shipped_recipes() if name.startswith(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """Run folders below runs/ that complete a word."""
    found = (str(file.parent) for file in sorted(RUNS.glob("*/config.yaml")))
    return [folder for folder in found if folder.startswith(incomplete)]


SCHEMA_COMMENT = "# yaml-language-server:"
"""Start of the line in a recipe that names its JSON schema, with which editors complete and check it."""
NEEDS = "# Needs: "
"""Start of the line in the head of a recipe that says what it needs."""
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

    Every command that accepts a recipe file also accepts these names. Examples: fovea train shapes; fovea recipes
    shapes > mine.yaml, to change a copy.
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
        raise DataError(f"{file}: its head lacks a sentence or a line `{NEEDS}...`; add both")
    return Described(sentence.group(), needs[0])


def _listed(name: str, described: Described) -> str:
    shown = (f"{name:<20}{described.text}", f"{'':<20}needs {described.needs}")
    return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent=" " * 20) for line in shown)


def _text_of(name: str) -> str:
    shipped = shipped_recipes()
    if name not in shipped:
        raise DataError(f"{name}: no such recipe in Fovea; the recipes are {', '.join(shipped)}")
    return shipped[name].read_text(encoding="utf-8")


WORDS_HELP = (
    "YAML files of settings, or names that `fovea recipes` lists (later ones win), and single settings, which win over "
    "both; values are YAML."
)

OPTIONS: Mapping[str, str] = {
    "train": "--dry-run[=full], --quiet, --debug and --help",
    "plan": "--json, --debug and --help",
    "doctor": "--gpu, --cpu, --families, --debug and --help",
    "reproduce": "--list, --debug and --help",
}
"""Options of the commands that treat everything with a leading dash as a word."""

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="RECIPE|KEY=VALUE", help=WORDS_HELP, autocompletion=complete_word),
]


def sort_words(words: list[str], command: str = "train") -> tuple[list[Path], list[str]]:
    """Split the words into recipes and overrides; ConfigError, with the likely intent, for a word that is neither."""
    recipes, overrides = [], []
    for word in words:
        key, equals, _ = word.partition("=")
        if word.startswith("-") and is_key(bare_key(word)):
            value = word.partition("=")[2] or "VALUE"
            raise ConfigError(f"{word}: settings have no dashes; write {bare_key(word)}={value}")
        if word.startswith("-"):
            raise ConfigError(
                f"{word}: no such option; the options are {OPTIONS[command]}, and settings are written key=value"
            )
        if equals and "/" not in key and not Path(word).is_file():  # a path may contain `=`
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
    """True if a word looks like a file name, or is the name of a file or of a recipe that comes with Fovea."""
    return "/" in word or word.endswith((".yaml", ".yml")) or Path(word).is_file() or word in shipped_recipes()


def is_key(word: str) -> bool:
    try:
        return bool(describe(word))
    except ConfigError:
        return False
