"""Settings in and out: recipes and `key=value` overrides become a `Config`, a `Config` becomes YAML.

A layer is one recipe or one override; later layers win:

* Mappings merge key by key, anything else replaces. `null` clears what earlier layers had there, so
  `model.lora=null model.lora.rank=8` starts the section over and `model.lora.rank=8` alone fills it up.
* A layer that chooses another variant (`environment.name=geo3k`) drops what earlier layers set in that
  section: those keys belong to the other variant. Among overrides the choice comes first, wherever it is
  written, so that an override is never dropped.
* A layer that chooses another `algorithm.name` drops what earlier layers set of the parts that the old name or
  the new one stands for.
* `environment: path/to/file.py:Class` stands for the section `{name: own, file: path/to/file.py:Class}`.
* Values are YAML, read strictly: `"8"` in quotes is text and no number.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from fovea.config.describe import (
    CLOSE_ENOUGH,
    Tree,
    hint,
    is_at_or_below,
    one_of,
    section_of,
    sections_of,
    show,
    type_text,
    unknown_key,
    variants_of,
)
from fovea.config.run import Config, OwnEnvironment, Section
from fovea.errors import ConfigError

COMMAND_LINE = "command line"
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


def load_config(recipes: Sequence[Path], overrides: Sequence[str]) -> Config:
    """Defaults < recipes, left to right < overrides; whatever is wrong is a one-line `ConfigError`."""
    layers = _Layers()
    for recipe in recipes:
        layers.add(read_recipe(recipe), str(recipe))
    for override in sorted(map(parse_override, overrides), key=_chooses_no_variant):
        layers.add(override, COMMAND_LINE)
    return layers.config()


def dump_config(config: Config, sections: Collection[str] = ()) -> str:
    """Every setting as YAML, in the order of the sections; `load_config` reads it back to an equal tree.

    With `sections` those alone. ConfigError for one that there is not.
    """
    tree = config.model_dump(mode="json")
    unknown = next((section for section in sections if section not in tree), None)
    if unknown is not None:
        raise ConfigError(f"{unknown}: no section of a recipe; there are {', '.join(tree)}")
    tree = {key: value for key, value in tree.items() if not sections or key in sections}
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


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
    tree = _parse_yaml(content, str(recipe))
    if not isinstance(tree, dict):
        seen = "it is empty" if tree is None else f"it holds {show(tree)}"
        raise ConfigError(f"{recipe}: a recipe is a mapping of settings, but {seen}; write lines such as `seed: 0`")
    return _with_own_environment(tree)


def parse_override(text: str) -> Tree:
    """`a.b=value` as the tree `{a: {b: value}}`."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{COMMAND_LINE}: {text}: an override is written key=value, such as seed=1")
    tree = _parse_yaml(value, f"{COMMAND_LINE}: {key}")
    for part in reversed(key.split(".")):
        tree = {part: tree}
    assert isinstance(tree, dict)
    return _with_own_environment(tree)


def _with_own_environment(layer: Tree) -> Tree:
    """`environment: path/to/file.py:Class` as the section that it stands for."""
    value = layer.get("environment")
    if not isinstance(value, str) or ".py" not in value:
        return layer
    return layer | {"environment": {"name": OwnEnvironment.model_fields["name"].default, "file": value}}


class _Layers:
    """The merged tree, and which layer each key came from."""

    def __init__(self) -> None:
        # the one section without a default: empty, so that its own check says what it needs
        self.values: Tree = {"model": {}}
        self.sources: dict[str, str] = {}
        self.order: list[str] = []

    def add(self, layer: Tree, source: str) -> None:
        if source not in self.order:
            self.order.append(source)
        self._merge(self.values, layer, Config, "", source)

    def config(self) -> Config:
        self._one_model_source()
        try:
            # strict JSON takes lists for tuples and integers for floats, and nothing else that looks alike
            return Config.model_validate_json(json.dumps(self.values), strict=True)
        except ValidationError as error:
            raise ConfigError(self._explain(error)) from None

    def _merge(self, into: Tree, layer: Tree, section: type[Section], path: str, source: str) -> None:
        for name, value in _spelled_out(layer, section, path, source).items():
            key = f"{path}{name}"
            field = section.model_fields.get(name)
            if field is None:
                raise ConfigError(f"{source}: {unknown_key(_full_key(key, value))}")
            self.sources[key] = source
            if not isinstance(value, dict):
                self._forget_below(key)
                into[name] = _plain(value, key, source)
            elif sections_of(field):
                current = into[name] if isinstance(into.get(name), dict) else {}
                into[name] = self._choose_variant(field, current, value, key, source)
                self._merge(into[name], value, section_of(field, into[name]), f"{key}.", source)
            else:
                current = into[name] if isinstance(into.get(name), dict) else {}
                into[name] = {**current, **_plain(value, key, source)}
                self.sources |= {f"{key}.{entry}": source for entry in value}

    def _choose_variant(self, field: FieldInfo, current: Tree, new: Tree, key: str, source: str) -> Tree:
        """What of `current` the section starts from, its variant written out."""
        tag = field.discriminator
        if not isinstance(tag, str):
            return self._choose_bundle(section_of(field, current), current, new, key)
        old_name = current.get(tag, getattr(field.get_default(call_default_factory=True), tag))
        name = new.get(tag, old_name)
        variants = variants_of(field)
        if not isinstance(name, str) or name not in variants:
            raise ConfigError(f"{source}: {key}.{tag}: {show(name)} does not fit; allowed: {one_of(variants)}")
        if name == old_name:
            return {tag: name} | current
        self._forget_below(key)
        return {tag: name}

    def _choose_bundle(self, section: type[Section], current: Tree, new: Tree, key: str) -> Tree:
        """What of `current` stays when a layer chooses a name that stands for some of it."""
        name = new.get("name")
        if not section.bundles or name is None or name == current.get("name"):
            return current
        old = section.bundles.get(str(current.get("name")), {})
        replaced = {*section.bundles.get(str(name), {}), *old, *section.follow_the_name}
        for entry in replaced:
            self._forget_below(f"{key}.{entry}")
            self.sources.pop(f"{key}.{entry}", None)
        return {entry: value for entry, value in current.items() if entry not in replaced}

    def _forget_below(self, key: str) -> None:
        for known in [known for known in self.sources if known.startswith(f"{key}.")]:
            del self.sources[known]

    def _one_model_source(self) -> None:
        """The one clash that a sound override makes with a sound recipe: say how to lift it."""
        model = self.values["model"]
        if not isinstance(model, dict) or model.get("path") is None or model.get("tiny") is None:
            return
        by_layer = {self.order.index(self.sources[key]): key for key in ("model.path", "model.tiny")}
        if len(by_layer) == 2:
            first, last = by_layer[min(by_layer)], by_layer[max(by_layer)]
            raise ConfigError(
                f"{self.sources[last]}: {last} is set, but {self.sources[first]} sets {first} "
                f"and a run has one model; add {first}=null"
            )

    def _explain(self, error: ValidationError) -> str:
        details = error.errors(include_url=False)[0]
        key, value, allowed = self._locate(details["loc"])
        sources = self._sources_at(key)
        where = f"{' and '.join(sources)}: " if sources else ""
        if details["type"] == "value_error":
            return f"{where}{details['ctx']['error']}"
        if details["type"] == "missing" and value is None:
            return f"{where}{key}: must be set; allowed: {allowed}"
        return f"{where}{key}: {show(value)} does not fit; allowed: {allowed}{hint(key, value, allowed)}"

    def _locate(self, loc: tuple[int | str, ...]) -> tuple[str, object, str]:
        """Key, value and allowed type of what pydantic complains of; its way there names the variants too."""
        names: list[str] = []
        value: Any = self.values
        allowed = ""
        section: type[Section] = Config
        steps = iter(loc)
        for step in steps:
            names.append(str(step))
            value = value.get(step)
            field = section.model_fields[str(step)]
            allowed = type_text(field.annotation, field.metadata)
            if variants_of(field):
                next(steps, None)
            if not isinstance(value, dict):
                break
            if not sections_of(field):
                entry = str(next(steps, ""))
                if entry in value:
                    names, value = [*names, entry], value[entry]
                    allowed = type_text(get_args(field.annotation)[1])
                break
            section = section_of(field, value)
        return ".".join(names), value, allowed

    def _sources_at(self, key: str) -> list[str]:
        """The layers that set this key or one below it; where none did, those of the section around it."""
        below = {source for known, source in self.sources.items() if is_at_or_below(known, key)}
        if below or not key:
            return [source for source in self.order if source in below]
        return self._sources_at(key.rpartition(".")[0])


def _spelled_out(layer: Tree, section: type[Section], path: str, source: str) -> Tree:
    """The layer with the settings that an alias stands for in its place."""
    for alias in section.aliases.keys() & layer.keys():
        names = section.aliases[alias]
        if set(names) & layer.keys():
            raise ConfigError(
                f"{source}: {path}{alias} stands for {' and '.join(names)}, which are set beside it; drop one of them"
            )
        layer = {key: value for key, value in layer.items() if key != alias} | dict.fromkeys(names, layer[alias])
    return layer


def _chooses_no_variant(override: Tree) -> bool:
    """Sort key: overrides that choose a variant go first."""
    for name, value in override.items():
        field = Config.model_fields.get(name)
        if field is None or not isinstance(value, dict):
            continue
        if field.discriminator in value or ("name" in value and any(x.bundles for x in sections_of(field))):
            return False
    return True


def _plain(value: Any, key: str, source: str) -> Any:
    """The value, if JSON can hold it: no sets, no bytes, no infinity, no keys but texts."""
    try:
        json.dumps(value, allow_nan=False)
        plain = not isinstance(value, dict) or all(isinstance(entry, str) for entry in value)
    except (TypeError, ValueError):
        plain = False
    if not plain:
        raise ConfigError(
            f"{source}: {key}: {str(value)[:60]} does not fit; a value is text, a finite number, true, "
            "false, null, a list, or a mapping with texts as keys"
        )
    return value


def _parse_yaml(content: str | bytes, where: str) -> Any:
    try:
        return yaml.load(content, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f" line {mark.line + 1}" if mark and isinstance(content, bytes) else ""
        raise ConfigError(f"{where}{line}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {str(error).splitlines()[0]}") from None


def _full_key(key: str, value: object) -> str:
    """The key with the only one below it and so on: what the user of `a.b=value` wrote."""
    while isinstance(value, dict) and len(value) == 1:
        (below, value), *_ = value.items()
        key = f"{key}.{below}"
    return key


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
