"""Recipes as files: YAML that is strict where PyYAML guesses, and written so that it reads back to the same values."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import yaml

from fovea.config.base import Tree
from fovea.config.type_text import show
from fovea.errors import ConfigError

COMMAND_LINE = "command line"
CLOSE_ENOUGH = 0.7
"""Likeness (difflib) of a near match; at its usual 0.6 `lr` would be `model.lora`."""
FLOAT_WITHOUT_POINT = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+")
"""YAML 1.1 takes `1e-6` for text; everybody who writes it means the number."""


class _Loader(yaml.SafeLoader):
    """safe_load that refuses a key written twice, reads 1e-6 as a number, and leaves dates text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own way to say it)
        first: [(tag, pattern) for tag, pattern in pairs if not tag.endswith(":timestamp")]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is written twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """safe_dump that quotes the texts which `_Loader` would read as something else."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        # PyYAML writes these four as they are and reads them as line breaks or not at all
        style = '"' if set(text) & set("\x85\u2028\u2029\ufeff") else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _Dumper.represent_str)
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT_WITHOUT_POINT, list("-+0123456789"))


def read_recipe(recipe: Path) -> Tree:
    """One YAML file."""
    try:
        content = recipe.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{recipe}: no such recipe; {_near_recipes(recipe)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{recipe}: a folder, no recipe; {_near_recipes(recipe / 'any')}") from None
    except OSError as error:
        raise ConfigError(f"{recipe}: cannot be read ({error.strerror}); give a YAML file") from None
    tree = read_yaml(content, str(recipe))
    if not isinstance(tree, dict):
        seen = "it is empty" if tree is None else f"it holds {show(tree)}"
        raise ConfigError(f"{recipe}: a recipe is a mapping of settings, but {seen}; write lines such as `seed: 0`")
    return tree


def parse_override(text: str) -> Tree:
    """`a.b=value` as the tree `{a: {b: value}}`."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{COMMAND_LINE}: {text}: an override is written key=value, such as seed=1")
    tree = read_yaml(value, f"{COMMAND_LINE}: {key}")
    for part in reversed(key.split(".")):
        tree = {part: tree}
    assert isinstance(tree, dict)
    return tree


def read_yaml(content: str | bytes, where: str) -> Any:
    """The value that YAML text holds; ConfigError with the line where it is not valid."""
    try:
        return yaml.load(content, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f" line {mark.line + 1}" if mark and isinstance(content, bytes) else ""
        raise ConfigError(f"{where}{line}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {str(error).splitlines()[0]}") from None


def write_yaml(tree: dict[str, Any]) -> str:
    """YAML text that `read_yaml` reads back to equal values."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _near_recipes(recipe: Path) -> str:
    """The recipes that may be meant: near names in the same folder, or in recipes/ for a bare name."""
    folders = [recipe.parent] if recipe.parent.name else [Path(), Path("recipes")]
    found = {path.with_suffix("").name: path for folder in folders for path in sorted(folder.glob("*.y*ml"))}
    near = difflib.get_close_matches(recipe.with_suffix("").name, found, cutoff=CLOSE_ENOUGH)
    if near:
        return f"did you mean {' or '.join(str(found[name]) for name in near)}?"
    if found:
        return f"there are {', '.join(str(path) for path in found.values())}"
    return f"no *.yaml in {' or '.join(f'{folder}/' for folder in folders)}"
