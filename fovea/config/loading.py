"""Loading and writing of settings: recipes and `key=value` overrides become a `Config`, a `Config` becomes YAML.

A layer is one recipe or one override; later layers win:

* Mappings merge key by key, anything else replaces. `null` clears what earlier layers had there, so
  `model.lora=null model.lora.rank=8` starts the section over, and only the rank is set in it.
* A layer that chooses another member of a union (`environment.name=geo3k`, or `algorithm.loss=sapo` for short) drops
  what earlier layers set in that section. A layer that chooses another `algorithm.name` drops what earlier layers set
  for the parts that the old or the new name stands for. Among overrides these choices are applied first, wherever they
  are written, so that an override is never dropped.
* Values are YAML, read strictly: `"8"` in quotes is text, not a number.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from fovea.config.describe import (
    allowed_at,
    describe,
    full_key,
    has_setting,
    hint_elsewhere,
    is_at_or_below,
    listed,
    settings,
    unknown_key,
    unknown_name,
)
from fovea.config.recipes import Override, read_override, read_recipe, write_yaml
from fovea.config.run import Config
from fovea_gym.errors import ConfigError
from fovea_gym.rows.readers.frame import is_frame
from fovea_gym.settings.base import (
    NAME,
    ContradictionError,
    Section,
    Tree,
    default_name,
    is_union,
    leaves,
    long_forms,
    packages_of,
    sections_of,
    variant_of,
)
from fovea_gym.settings.splits import ROWS_FOLDER
from fovea_gym.settings.type_text import hint, show
from fovea_gym.utils.shown_text import tree_without_secrets

_PARTS = "environment.parts"
_RESUME = {True: "auto", False: "never"}
"""Values of `resume` for a boolean in another system."""
_SPELLED = {"true": "on and yes", "false": "off and no", "null": "~ and an empty key"}
"""Other spellings that YAML reads as true, false and null."""


def load_config(recipes: Sequence[Path], overrides: Sequence[Override]) -> Config:
    """Load settings: defaults < recipes, left to right < overrides; every fault is a one-line `ConfigError`."""
    return _layers(recipes, overrides).config()


def environment_of(recipes: Sequence[Path], overrides: Sequence[Override]) -> str | None:
    """`environment.name` as recipes and overrides set it, before anything else is checked."""
    return leaves(_layers(recipes, overrides).values).get(f"environment.{NAME}")


def config_of(tree: Tree, source: str) -> Config:
    """Load the settings of one tree over the defaults; a `ConfigError` names the source."""
    layers = _Layers()
    layers.add(tree, source)
    return layers.config()


def load_run_config(recipes: Sequence[Path], overrides: Sequence[Override]) -> Config:
    """Load a run's settings; if its folder has no rows, those in the folder of a recipe's run are used."""
    config = load_config(recipes, overrides)
    own = Path(config.run_dir) / ROWS_FOLDER
    beside = next((recipe.parent for recipe in recipes if (recipe.parent / ROWS_FOLDER).is_dir()), None)
    return config if own.is_dir() or beside is None else config.with_files_of(str(beside))


def dropped_settings(recipes: Sequence[Path], overrides: Sequence[Override]) -> Tree:
    """The recipes' settings, by dotted key, that overrides dropped by choosing another member of their section."""
    before, after = (leaves(_layers(recipes, words).values) for words in ([], overrides))
    # null, or a value in place of a section, was written by the user and needs no report
    replaced = tuple(f"{key}." for key in after)
    return {key: value for key, value in before.items() if key not in after and not key.startswith(replaced)}


def public_settings(config: Config) -> Tree:
    """Every setting as a JSON value, without passwords and keys of URLs: for files, pages and services."""
    settings: Tree = tree_without_secrets(config.model_dump(mode="json"))
    return settings


def dump_config(config: Config, sections: Collection[str] = ()) -> str:
    """Every setting as YAML, in the order of the sections; `load_config` reads it back to an equal tree.

    Passwords and keys of URLs are hidden and must be given again.

    `sections` limits the output to these; ConfigError for an unknown one.
    """
    tree = public_settings(config)
    unknown = next((section for section in sections if section not in tree), None)
    if unknown is not None:
        raise ConfigError(f"{unknown}: no such section of a recipe; the sections are {', '.join(tree)}")
    return write_yaml({key: value for key, value in tree.items() if not sections or key in sections})


def keys_of(overrides: Sequence[Override]) -> set[str]:
    """The dotted keys that overrides set, short forms expanded: `environment=a.py:C` sets `environment.file`."""
    found = [each for override in overrides for each in _given((Config,), read_override(override)[1])]
    return set(leaves({key: value for key, field, value in found if not value or not _within(field, value)}))


def package_parts(tree: Tree) -> set[tuple[str, str]]:
    """Key and name of each component from another package that the settings choose; does not import the package."""
    return {
        (f"{key}.{NAME}", value[NAME])
        for key, field, value in _given((Config,), tree)
        if field is not None and isinstance(value, dict) and value.get(NAME) in packages_of(field)
    }


def _given(
    sections: Sequence[type[Section]], tree: Tree, path: str = ""
) -> Iterator[tuple[str, FieldInfo | None, Any]]:
    """Every setting in a tree, short forms expanded, whichever member of a union has it."""
    for section in sections:
        tree = _long_forms(section, tree, path)
    for name, value in tree.items():
        fields = [found for section in sections if (found := section.field_of(name)) is not None]
        yield f"{path}{name}", fields[0] if fields else None, value
        if inner := tuple(dict.fromkeys(each for field in fields for each in _within(field, value))):
            yield from _given(inner, value, f"{path}{name}.")


def _within(field: FieldInfo | None, value: object) -> tuple[type[Section], ...]:
    """The sections that a mapping may be; none for other values, and for a setting that is a plain mapping."""
    return sections_of(field) if field is not None and isinstance(value, dict) else ()


def _layers(recipes: Sequence[Path], overrides: Sequence[Override]) -> _Layers:
    layers = _Layers()
    for recipe in recipes:
        layers.add(read_recipe(recipe), str(recipe))
    layers.check_keys()
    for source, override in sorted(map(read_override, overrides), key=lambda each: _choices_first(each[1])):
        layers.add(override, source)
    layers.check_keys()
    return layers


class _Layers:
    """The merged tree, and the layers from which it was made."""

    def __init__(self) -> None:
        # the only section without a default; it starts empty, so that its own check reports what it needs
        self.values: Tree = {"model": {}}
        self.layers: list[tuple[str, Tree]] = []
        self.complaints: list[str] = []
        """Error texts for unknown keys, each with its source."""

    def add(self, layer: Tree, source: str) -> None:
        self.layers.append((source, layer))
        try:
            unknown = list(_merge(self.values, layer, Config, ""))
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
        self.complaints += [f"{source}: {unknown_key(key, self._choices())}" for key in unknown]

    def check_keys(self) -> None:
        """ConfigError that lists all unknown keys so far."""
        if self.complaints:
            raise ConfigError(_all_of(self.complaints))

    def _choices(self) -> set[str]:
        """The chosen members of unions, and all other values, as `key=value`."""
        return {f"{name}={chosen}" for name, chosen in leaves(self.values).items()}

    def config(self) -> Config:
        self.check_keys()
        self._one_model_source()
        self._no_part_by_a_slip()
        try:
            return Config.model_validate(self.values, strict=True)
        except ValidationError as error:
            raise ConfigError(self._explain(error)) from None

    def _one_model_source(self) -> None:
        """ConfigError if different layers set model.path and model.tiny; it says which one to set to null."""
        model = self.values["model"]
        if not isinstance(model, dict) or model.get("path") is None or model.get("tiny") is None:
            return
        (first, old), (last, new) = sorted((self._sources_at(key)[-1], key) for key in ("model.path", "model.tiny"))
        if first != last:
            raise ConfigError(
                f"{last[1]}: {new} is set, but {first[1]} sets {old} and a run has one model; add {old}=null"
            )

    def _no_part_by_a_slip(self) -> None:
        """ConfigError for a part that a later layer adds without an environment: `parts.colour.share` for `colours`."""
        parts_of = [_parts(layer) for _, layer in self.layers]
        first = next((parts for parts in parts_of if parts), ())
        for (source, _), parts in zip(self.layers, parts_of, strict=True):
            # a name with . or / is refused later, with the reason, when the settings are checked
            for name in (name for name in parts if name not in first and not set(name) & {".", "/"}):
                chosen = f"{_PARTS}.{name}.environment.{NAME}"
                if not any(_has(layer, chosen) for _, layer in self.layers):
                    near = difflib.get_close_matches(name, first, n=1)
                    meant = f"; did you mean {_PARTS}.{near[0]}?" if near else ""
                    raise ConfigError(f"{source}: {_PARTS}.{name}: no such part; {chosen} would add one{meant}")

    def _explain(self, error: ValidationError) -> str:
        """Error text with each invalid setting once: pydantic reports an error for each type that a value may have."""
        found: dict[str, tuple[Any, Mapping[str, Any]]] = {}
        for details in error.errors(include_url=False):
            key, value = _locate(self.values, details["loc"], is_missing=details["type"] == "missing")
            found.setdefault(key, (value, dict(details)))
        return _all_of([self._explain_one(key, *about) for key, about in found.items()])

    def _explain_one(self, key: str, value: Any, details: Mapping[str, Any]) -> str:
        is_missing = details["type"] == "missing" and value is None
        # the layer that chose a section must give what the section lacks
        asked = f"{key.rpartition('.')[0]}.{NAME}" if is_missing else key
        sources = dict.fromkeys(source for _, source in self._sources_at(asked))
        where = f"{' and '.join(sources)}: " if sources else ""
        part, inner = listed(key)
        if details["type"] == "value_error":
            complaint = details["ctx"]["error"]
            if isinstance(complaint, ContradictionError):
                complaint = complaint.below(inner)
            return f"{where}{f'{part}: ' if part else ''}{complaint}{self._dropped_below(key)}"
        allowed = allowed_at(key, self._choices())
        if is_missing:
            dropped = self._dropped_below(key.rpartition(".")[0])
            return f"{where}{key}: must be set{dropped or f'; allowed: {allowed}'}"
        # fields of another system's section below a setting of Fovea, such as reward.reward_max_val
        for below in (f"{key}.{name}" for name in leaves(value)) if isinstance(value, dict) else ():
            if elsewhere := hint_elsewhere(below, "key", "last name"):
                return f"{where}{elsewhere}"
        is_resume = key == "resume" and isinstance(value, bool)
        fix = f"; {show(value)} is resume={_RESUME[value]} here" if is_resume else hint(key, value, allowed)
        return f"{where}{key}: {show(value)} does not fit; allowed: {allowed}{fix}"

    def _dropped_below(self, section: str) -> str:
        """Error text with the settings of a section that were dropped when a later layer chose another member."""
        kept = leaves(self.values)
        name = f"{section}.{NAME}"
        choice = f"{name}={kept.get(name)}"
        dropped = {
            key: (value, source)
            for source, layer in self.layers
            for key, value in leaves(layer).items()
            if key.startswith(f"{section}.") and key not in kept and has_setting(choice, key)
        }
        if not dropped:
            return ""
        sources = " and ".join(dict.fromkeys(source for _, source in dropped.values()))
        words = ", ".join(f"{key}={show(value)}" for key, (value, _) in dropped.items())
        return f"; {choice} dropped what {sources} had set there ({words}): set again what should stay"

    def _sources_at(self, key: str) -> list[tuple[int, str]]:
        """The layers that set this key or one below it; if none did, those that set the enclosing section."""
        names = [source for source, _ in self.layers]
        found = [(names.index(source), source) for source, layer in self.layers if _has(layer, key)]
        is_section = not key or isinstance(_locate(self.values, tuple(key.split(".")))[1], dict)
        if found or not key:
            return found if is_section else found[-1:]
        return self._sources_at(key.rpartition(".")[0])


def _all_of(complaints: Sequence[str]) -> str:
    """Join error texts on one line; a source that all of them begin with appears once."""
    source = f"{complaints[0].partition(': ')[0]}: "
    if all(each.startswith(source) for each in complaints):
        return source + "; also: ".join(each.removeprefix(source) for each in complaints)
    return "; also: ".join(complaints)


def _merge(into: Tree, layer: Tree, section: type[Section], path: str) -> Iterator[str]:
    """Set the values of a layer in the tree, section by section; yield the unknown keys."""
    _check_texts(path, layer)
    layer = _long_forms(section, layer, path)
    old, new = into.get(NAME), layer.get(NAME)
    if isinstance(new, str) and new in section.bundles and new != old:
        # the name stands for several settings and replaces their earlier values
        for entry in section.bundles.get(str(old), {}):
            into.pop(entry, None)
        into |= long_forms(section, copy.deepcopy(section.bundles[new]))
    for name, value in layer.items():
        key, field, current = f"{path}{name}", section.field_of(name), into.get(name)
        if field is None:
            full = full_key(key, value)
            _check_nested(path, name)
            # keys inside the parts of a mixture mean nothing if there is no mixture
            yield full if listed(full)[0] == listed(key)[0] else key
        elif not isinstance(value, dict):
            into[name] = _plain(value, key)
        elif not sections_of(field):
            into[name] = {**(current if isinstance(current, dict) else {}), **_plain(value, key)}
        else:
            into[name], chosen = _section_for(field, current if isinstance(current, dict) else {}, value, key)
            yield from _merge(into[name], value, chosen, f"{key}.")


def _long_forms(section: type[Section], given: Tree, path: str) -> Tree:
    try:
        return long_forms(section, given)
    except ValueError as error:
        raise ConfigError(f"{path}{error}") from None


def _check_texts(path: str, names: Iterable[object]) -> None:
    """ConfigError for a name in a section that is not text, such as `on`, which YAML reads as true."""
    where = f"{path[:-1]}: " if path else ""
    for name in names:
        if not isinstance(name, str):
            spelled = _SPELLED.get(show(name))
            read = f" ({spelled} are read as {show(name)})" if spelled else ""
            raise ConfigError(
                f"{where}the key {show(name)}{read} is not text, which a setting's name must be; put it in quotes"
            )


def _check_nested(path: str, name: str) -> None:
    """ConfigError for a dotted name in place of nested sections."""
    *sections, last = name.split(".")
    # a union's settings are listed under its own key
    if sections and any(is_at_or_below(setting.key, f"{path}{name}") for setting in settings()):
        nested = "".join(f"{section}: {{" for section in sections) + f"{last}: ..." + "}" * len(sections)
        raise ConfigError(f"{path}{name}: in files and mappings, write nested sections instead of dots: {nested}")


def _section_for(field: FieldInfo, current: Tree, new: Tree, key: str) -> tuple[Tree, type[Section]]:
    """Choose the member of a union, and the current values to keep: none if another member was chosen before."""
    if not is_union(field):
        return current, sections_of(field)[0]
    name = new.get(NAME, current.get(NAME, default_name(field)))
    chosen = variant_of(field, name)
    if chosen is None:
        raise ConfigError(unknown_name(key, field, name))
    return (current if current.get(NAME) == name else {NAME: name}), chosen


def _choices_first(override: Tree) -> int:
    """Sort key: overrides that choose a member of a union or a name of a bundle first, outer ones before inner ones."""
    key = full_key("", override).lstrip(".")
    part, inner = listed(key)
    choices = {setting.key for setting in describe() if setting.key.endswith(f".{NAME}")}
    depths = (f"{part}.{choice}".count(".") for choice in choices if choice in (inner, f"{inner}.{NAME}"))
    return next(depths, len(choices))


def _parts(layer: Tree) -> Sequence[str]:
    found: Any = layer
    for name in _PARTS.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return list(found) if isinstance(found, dict) else []


def _has(layer: Tree, key: str) -> bool:
    """True if a layer sets a key or something below it; a short form sets all of its section."""
    name, _, below = key.partition(".")
    return not key or (name in layer and (not isinstance(layer[name], dict) or _has(layer[name], below)))


def _locate(values: Any, loc: Sequence[int | str], *, is_missing: bool = False) -> tuple[str, Any]:
    """Key and value at a location of a pydantic error, which may include names of union members.

    `is_missing`: the location ends with a key that its section lacks.
    """
    names, value = [], values
    for step in loc:
        if not isinstance(value, dict):
            break
        if step in value or (is_missing and step != value.get(NAME)):
            names.append(str(step))
            value = value.get(step)
    return ".".join(names), value


def _plain(value: Any, key: str) -> Any:
    """Return a value that JSON can hold; ConfigError for sets, bytes, infinity and keys that are not text."""
    try:
        json.dumps(value, allow_nan=False)
        plain = not isinstance(value, dict) or all(isinstance(entry, str) for entry in value)
    except (TypeError, ValueError):
        plain = False
    if not plain:
        if is_frame(value):
            raise ConfigError(
                f"{key} is a DataFrame, which no setting accepts; give its rows as rows= (docs/python.md)"
            )
        raise ConfigError(
            f"{key}: {' '.join(str(value)[:60].split())} does not fit; a value is text, a finite number, true, "
            "false, null, a list, or a mapping with text keys"
        )
    return value
