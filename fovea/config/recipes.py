"""Recipe files: YAML that is strict where PyYAML guesses, and written so that it reads back to the same values."""

from __future__ import annotations

import difflib
import itertools
import os
import re
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from fovea_gym.errors import ConfigError
from fovea_gym.settings.base import Tree, nested
from fovea_gym.settings.type_text import show
from fovea_gym.utils.bounded import MIB

COMMAND_LINE, ARGUMENTS = "command line", "arguments"
Override: TypeAlias = str | Tree
"""A setting that wins over recipes: `a.b=value`, or nested mappings, as Python code gives them."""
CLOSE_ENOUGH = 0.7
"""Similarity (difflib) of a near match; at difflib's default of 0.6, `lr` would match `model.lora`."""
FLOAT_WITHOUT_POINT = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$")
"""YAML 1.1 reads `1e-6` as text, but everybody who writes it means the number."""
OF_OTHER_BASES = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)$")
"""YAML 1.1 reads `1:30` as 90 and `010` as 8, but nobody who writes them means that."""

MAX_MIB = 1
"""The largest recipe, also with its aliases expanded: nested aliases can stand for more than any memory holds."""

TEXT = "tag:yaml.org,2002:str"

PACKAGE = Path(__file__).parents[1]


class _Loader(yaml.SafeLoader):
    """safe_load that refuses duplicate keys and recursive values; 1e-6 is a number; dates, 1:30 and 010 are text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own way to say it)
        # the first pattern that matches counts
        first: [(TEXT, OF_OTHER_BASES), *((tag, pattern) for tag, pattern in pairs if not tag.endswith(":timestamp"))]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, stream: str | bytes) -> None:
        super().__init__(stream)
        self.deep_construct = True  # constructs inner values at once: an alias would see an empty outer one

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _written_out(node, {}) > MAX_MIB * MIB:
            problem = f"its aliases expand to more than {MAX_MIB} MiB"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is written twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _written_out(node: yaml.Node, known: dict[int, int]) -> int:
    """Number of characters of a value with its aliases expanded; `known` holds the numbers of nodes by id."""
    if id(node) not in known:
        known[id(node)] = 0  # a value that contains itself, which is refused later
        if isinstance(node, yaml.ScalarNode):
            known[id(node)] = len(node.value) + 1
        else:
            parts = itertools.chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
            known[id(node)] = 1 + sum(_written_out(part, known) for part in parts)
    return known[id(node)]


class _Dumper(yaml.SafeDumper):
    """safe_dump that quotes text which `_Loader` would read as something else."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        # PyYAML writes these four characters unquoted, but reads them as line breaks or not at all
        style = '"' if set(text) & set("\x85\u2028\u2029\ufeff") else None
        return self.represent_scalar(TEXT, text, style)


_Dumper.add_representer(str, _Dumper.represent_str)
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT_WITHOUT_POINT, list("-+0123456789"))


def read_recipe(recipe: Path) -> Tree:
    """Read the settings in one YAML file."""
    try:
        with recipe.open("rb") as file:  # a path from the user, which may be a pipe
            content = file.read(MAX_MIB * MIB + 1)
    except FileNotFoundError:
        raise ConfigError(f"{recipe}: no such recipe; {_near_recipes(recipe)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{recipe}: a folder, not a recipe; {_near_recipes(recipe / 'any')}") from None
    except OSError as error:
        raise ConfigError(f"{recipe}: cannot be read ({error.strerror}); give a YAML file") from None
    if len(content) > MAX_MIB * MIB:
        raise ConfigError(f"{recipe}: larger than {MAX_MIB} MiB, which no recipe is; give a YAML file of settings")
    tree = read_yaml(content, str(recipe))
    if not isinstance(tree, dict):
        seen = "it is empty" if tree is None else f"it holds {show(tree)}"
        raise ConfigError(f"{recipe}: a recipe is a mapping of settings, but {seen}; write lines such as `seed: 0`")
    return tree


def recipes_folder() -> Path:
    """The folder of Fovea's recipes: inside the package in a wheel, next to it in a checkout."""
    inside = PACKAGE / "recipes"
    return inside if inside.is_dir() else PACKAGE.parent / "recipes"


def shipped_recipe(name: str) -> Path:
    """The file of a recipe that comes with Fovea, by its name without `.yaml`."""
    return recipes_folder() / f"{name}.yaml"


def shipped_recipes() -> dict[str, Path]:
    """The files of all recipes that come with Fovea, by name."""
    return {path.stem: path for path in sorted(recipes_folder().rglob("*.yaml"))}


def find_recipe(word: str | os.PathLike[str]) -> Path:
    """The file at this path, or else the recipe of this name that comes with Fovea."""
    path = Path(word)
    return path if path.is_file() else shipped_recipes().get(str(path), path)


def read_override(override: Override) -> tuple[str, Tree]:
    """Source of an override, for messages, and its tree."""
    return (COMMAND_LINE, parse_override(override)) if isinstance(override, str) else (ARGUMENTS, override)


def section_of(override: Override) -> str:
    """The first part of the key that an override sets."""
    return next(iter(override)) if isinstance(override, dict) else override.partition("=")[0].partition(".")[0]


def parse_override(text: str) -> Tree:
    """Parse `a.b=value` into the tree `{a: {b: value}}`."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{COMMAND_LINE}: {text}: an override is written key=value, such as seed=1")
    return nested(key.split("."), read_yaml(value, f"{COMMAND_LINE}: {key}"))


def read_yaml(content: str | bytes, where: str) -> Any:
    """The value in YAML text; ConfigError, with the line, if it is not valid."""
    try:
        return yaml.load(content, _Loader)
    except yaml.MarkedYAMLError as error:
        line, remark = _place(error, content) if isinstance(content, bytes) else ("", "")
        raise ConfigError(f"{where}{line}: not valid YAML: {error.problem}{remark}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise ConfigError(f"{where}: is nested too deeply to be read; flatten it") from None
    except (ValueError, LookupError, AttributeError) as error:  # from PyYAML for 5,000 digits or `!!bool abc`
        reason = str(error).partition(";")[0]
        raise ConfigError(f"{where}: not valid YAML: a value does not fit its form or tag ({reason})") from None


def _place(error: yaml.MarkedYAMLError, content: bytes) -> tuple[str, str]:
    """The line to correct, and a remark on an earlier line that may be wrong: PyYAML reports many faults too late."""
    context, mark = error.context or "", error.problem_mark
    if mark is None:
        return "", ""
    # a key without a colon, and a quote that never closes, are at fault where they begin
    if error.context_mark and context.startswith(("while scanning a simple key", "while scanning a quoted scalar")):
        return f" line {error.context_mark.line + 1}", ""
    lines = content.rstrip().split(b"\n")
    line = min(mark.line + 1, len(lines))  # without empty lines at the end
    if error.context_mark and "flow" in context and error.context_mark.line + 1 < line:
        return f" line {line}", f" (in the value that begins on line {error.context_mark.line + 1})"
    if error.problem in (
        "mapping values are not allowed here",
        "expected <block end>, but found '<block mapping start>'",
    ):
        texts = [(number, text.strip()) for number, text in enumerate(lines[: line - 1], start=1)]
        before, text = next((each for each in reversed(texts) if each[1] and not each[1].startswith(b"#")), (0, b":"))
        if b":" not in text and not text.startswith(b"-"):
            return f" line {line}", f" (or line {before} lacks its colon)"
    return f" line {line}", ""


def write_yaml(tree: dict[str, Any]) -> str:
    """Write YAML text that `read_yaml` reads back to equal values."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def write_value(value: object) -> str:
    """Write one value as YAML text on one line."""
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=float("inf"))
    return text.removesuffix("\n").removesuffix("\n...")


def _near_recipes(recipe: Path) -> str:
    """Text with recipes of similar names: in the same folder, in recipes/ for a bare name, or those of Fovea."""
    folders = [recipe.parent] if recipe.parent.name else [Path(), Path("recipes")]
    files = (path for folder in folders for path in sorted(folder.glob("*.y*ml")) if not path.name.startswith("."))
    found = {path.stem: str(path) for path in files}
    # Fovea's recipes by name, unless a local file has the same name
    known = {name: name for name in shipped_recipes()} | found
    name = recipe.with_suffix("").name
    if near := difflib.get_close_matches(name, known, cutoff=CLOSE_ENOUGH):
        return f"did you mean {' or '.join(known[each] for each in near)}?"
    nearest = [found[each] for each in difflib.get_close_matches(name, found, cutoff=0)]
    there_are = "there are" if len(found) == len(nearest) else "the nearest names are"
    nothing = f"no *.yaml in {' or '.join(f'{folder}/' for folder in folders)}"
    here = f"{there_are} {', '.join(nearest)}" if found else nothing
    return f"{here}; `fovea recipes` lists others"
