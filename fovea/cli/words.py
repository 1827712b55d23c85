"""Words of a command line: recipes, and settings that win over them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from fovea.cli.texts import Debug, one_line_errors
from fovea.config.describe import describe
from fovea.config.recipes import find_recipe, recipes_folder, shipped_recipes
from fovea.errors import ConfigError, DataError

RUNS = Path("runs")
"""The folder of runs by default (run_dir)."""
CHOICES = re.compile(r"[\w.+-]+(?: \| [\w.+-]+)+|true or false")
"""The type of a setting that takes one of a few words."""
ONE_WORD = re.compile(r"[\w.+-]+")


def complete_word(ctx: typer.Context, incomplete: str) -> list[str]:
    """The recipes by name that a word may become, and the settings, with their `=` and the values of choices."""
    before = [str(word) for word in ctx.params.get("words") or []]
    if (key := _key_before(before)) is not None:
        return [value for value in _choices(key) if value.startswith(incomplete)]
    key, equals, _ = incomplete.partition("=")
    settings = _values(key) if equals else _keys(incomplete)
    return [*complete_recipe(incomplete), *(word for word in settings if word.startswith(incomplete))]


def _key_before(words: list[str]) -> str | None:
    """The setting whose value is completed: bash takes `=` for a separate word."""
    names = words[:-1] if words and words[-1] == "=" else words
    return names[-1] if names and names[-1] in _types() else None


def _keys(incomplete: str) -> list[str]:
    found = [key for key in _types() if key.startswith(incomplete)]
    # bash and zsh put a space behind the only word there is, but none behind what several have in common
    return [f"{key}=" for key in found] if len(found) != 1 else [f"{found[0]}=", *_values(found[0])]


def _values(key: str) -> list[str]:
    """The words that set a key to each of its choices; where it has none, to its default."""
    default = next((each.default for each in describe() if each.key == key), "")
    return [f"{key}={value}" for value in _choices(key) or [default if ONE_WORD.fullmatch(default) else "VALUE"]]


def _choices(key: str) -> list[str]:
    type_ = _types().get(key, "")
    return re.split(r" \| | or ", type_) if CHOICES.fullmatch(type_) else []


def _types() -> dict[str, str]:
    return {each.key: each.type for each in describe()}


def complete_recipe(incomplete: str) -> list[str]:
    """The recipes by name that a word may become."""
    return [name for name in shipped_recipes() if name.startswith(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """The run folders below runs/ that a word may become."""
    found = (str(file.parent) for file in sorted(RUNS.glob("*/config.yaml")))
    return [folder for folder in found if folder.startswith(incomplete)]


NEEDS = "# Needs: "
"""Start of the line in the head of a recipe that says what it takes."""
NEEDS_ANOTHER = "another recipe before it"
"""The `Needs:` line of a recipe that only extends another one."""
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
    head = " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))
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
        if word.startswith("-"):
            raise ConfigError(_no_option(word, OPTIONS[command]))
        if equals and "/" not in key and not Path(word).is_file():  # a path may hold `=`
            overrides.append(word)
        elif not is_recipe(word) and is_key(word):
            raise ConfigError(f"{word}: a setting without a value; write {word}=VALUE")
        else:
            recipes.append(find_recipe(word))
    if not recipes:
        raise ConfigError(f"no recipe given; write fovea {command} shapes [KEY=VALUE]...")
    if recipes[0].resolve() in shipped_recipes().values() and describe_recipe(recipes[0]).needs.startswith(
        NEEDS_ANOTHER
    ):
        name = recipes[0].stem
        raise ConfigError(f"{name}: this recipe changes the one before it; write fovea {command} vqa {name}")
    return recipes, overrides


def _no_option(word: str, options: str) -> str:
    key = bare_key(word)
    if is_key(key):
        value = word.partition("=")[2] or "VALUE"
        return f"{word}: settings have no dashes; write {key}={value}"
    return f"{word}: no such option; there are {options}, and settings are written key=value"


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
