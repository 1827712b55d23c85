"""Settings in and out: recipes and `key=value` overrides become a `Config`, a `Config` becomes YAML.

A layer is one recipe or one override; later layers win:

* Mappings merge key by key, anything else replaces. `null` clears what earlier layers had there, so
  `model.lora=null model.lora.rank=8` starts the section over and `model.lora.rank=8` alone fills it up.
* A layer that chooses another variant (`environment.name=geo3k`) drops what earlier layers set in that
  section: those keys belong to the other variant. Among overrides the choice comes first, wherever it is
  written, so that an override is never dropped.
* Values are YAML, read strictly: `"8"` in quotes is text and no number.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from fovea.config import Config, Section
from fovea.errors import ConfigError

Tree: TypeAlias = dict[str, Any]
"""What YAML gives: nested mappings of plain values."""

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


class Setting(NamedTuple):
    """One key of the tree, for people."""

    key: str
    type: str
    default: str
    doc: str


def load_config(recipes: Sequence[Path], overrides: Sequence[str]) -> Config:
    """Defaults < recipes, left to right < overrides; whatever is wrong is a one-line `ConfigError`."""
    layers = _Layers()
    for recipe in recipes:
        layers.add(read_recipe(recipe), str(recipe))
    for override in sorted(map(parse_override, overrides), key=_chooses_no_variant):
        layers.add(override, COMMAND_LINE)
    return layers.config()


def dump_config(config: Config) -> str:
    """Every setting as YAML, in the order of `config.py`; `load_config` reads it back to an equal tree."""
    tree = config.model_dump(mode="json")
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def describe(prefix: str = "") -> list[Setting]:
    """Every key at or below `prefix`, those of all variants and optional sections too."""
    chosen = [
        setting._replace(doc=f"[{variant}] {setting.doc}") if variant else setting
        for variant, setting in _walk(Config, "")
        if _is_at_or_below(setting.key, prefix)
    ]
    if not chosen:
        raise ConfigError(_unknown(prefix))
    return chosen


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
        seen = "it is empty" if tree is None else f"it holds {_show(tree)}"
        raise ConfigError(f"{recipe}: a recipe is a mapping of settings, but {seen}; write lines such as `seed: 0`")
    return tree


def parse_override(text: str) -> Tree:
    """`a.b=value` as the tree `{a: {b: value}}`."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{COMMAND_LINE}: {text}: an override is written key=value, such as seed=1")
    tree = _parse_yaml(value, f"{COMMAND_LINE}: {key}")
    for part in reversed(key.split(".")):
        tree = {part: tree}
    assert isinstance(tree, dict)
    return tree


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
        for name, value in layer.items():
            key = f"{path}{name}"
            field = section.model_fields.get(name)
            if field is None:
                raise ConfigError(f"{source}: {_unknown(_full_key(key, value))}")
            self.sources[key] = source
            if not isinstance(value, dict):
                self._forget_below(key)
                into[name] = _plain(value, key, source)
            elif _sections(field):
                current = into[name] if isinstance(into.get(name), dict) else {}
                into[name] = self._choose_variant(field, current, value, key, source)
                self._merge(into[name], value, _section_of(field, into[name]), f"{key}.", source)
            else:
                current = into[name] if isinstance(into.get(name), dict) else {}
                into[name] = {**current, **_plain(value, key, source)}
                self.sources |= {f"{key}.{entry}": source for entry in value}

    def _choose_variant(self, field: FieldInfo, current: Tree, new: Tree, key: str, source: str) -> Tree:
        """What of `current` the section starts from, its variant written out."""
        tag = field.discriminator
        if not isinstance(tag, str):
            return current
        old_name = current.get(tag, getattr(field.get_default(call_default_factory=True), tag))
        name = new.get(tag, old_name)
        variants = _variants(field)
        if not isinstance(name, str) or name not in variants:
            raise ConfigError(f"{source}: {key}.{tag}: {_show(name)} does not fit; allowed: {_one_of(variants)}")
        if name == old_name:
            return {tag: name} | current
        self._forget_below(key)
        return {tag: name}

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
        return f"{where}{key}: {_show(value)} does not fit; allowed: {allowed}{_hint(key, value, allowed)}"

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
            allowed = _type_text(field.annotation, field.metadata)
            if _variants(field):
                next(steps, None)
            if not isinstance(value, dict):
                break
            if not _sections(field):
                entry = str(next(steps, ""))
                if entry in value:
                    names, value = [*names, entry], value[entry]
                    allowed = _type_text(get_args(field.annotation)[1])
                break
            section = _section_of(field, value)
        return ".".join(names), value, allowed

    def _sources_at(self, key: str) -> list[str]:
        """The layers that set this key or one below it; where none did, those of the section around it."""
        below = {source for known, source in self.sources.items() if _is_at_or_below(known, key)}
        if below or not key:
            return [source for source in self.order if source in below]
        return self._sources_at(key.rpartition(".")[0])


def _is_at_or_below(key: str, prefix: str) -> bool:
    return not prefix or f"{key}.".startswith(f"{prefix}.")


def _sections(field: FieldInfo) -> tuple[type[Section], ...]:
    """The sections that a field may hold: one, one per variant, or none (a plain setting)."""
    return tuple(_sections_in(field.annotation))


def _sections_in(annotation: object) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in get_args(annotation):
        yield from _sections_in(part)


def _variants(field: FieldInfo) -> dict[str, type[Section]]:
    """The sections of a field that has several, by the name which chooses them."""
    tag = field.discriminator
    if not isinstance(tag, str):
        return {}
    return {section.model_fields[tag].default: section for section in _sections(field)}


def _section_of(field: FieldInfo, value: Tree) -> type[Section]:
    variants = _variants(field)
    return variants[value[str(field.discriminator)]] if variants else _sections(field)[0]


def _chooses_no_variant(override: Tree) -> bool:
    """Sort key: overrides that choose a variant go first."""
    for name, value in override.items():
        field = Config.model_fields.get(name)
        if field is not None and isinstance(value, dict) and field.discriminator in value:
            return False
    return True


def _walk(section: type[Section], path: str, variant: str = "") -> Iterator[tuple[str, Setting]]:
    """Every setting at or below a section, with the variant (`environment.name=geo3k`) that has it."""
    for name, field in section.model_fields.items():
        key, doc, variants = f"{path}{name}", _doc(section, field), _variants(field)
        if variants:
            tag = f"{key}.{field.discriminator}"
            default = getattr(field.get_default(call_default_factory=True), str(field.discriminator))
            doc = " ".join(f"{choice}: {_first_line(inner)}" for choice, inner in variants.items())
            yield "", Setting(tag, _one_of(variants), default, doc)
            for choice, inner in variants.items():
                below = _walk(inner, f"{key}.", f"{tag}={choice}")
                yield from (pair for pair in below if pair[1].key != tag)
        elif _sections(field):
            if not field.is_required() and field.default is None:
                yield variant, Setting(key, _type_text(field.annotation, field.metadata), "null", doc)
            yield from _walk(_sections(field)[0], f"{key}.", variant)
        else:
            text = _type_text(field.annotation, field.metadata)
            yield variant, Setting(key, text, _default_text(field), doc)


def _doc(section: type[Section], field: FieldInfo) -> str:
    inner = _sections(field)
    return field.description or _first_line(inner[0] if inner else section)


def _first_line(section: type[Section]) -> str:
    return (section.__doc__ or "").strip().split("\n")[0]


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "must be set"
    default = field.get_default(call_default_factory=True)
    return default if isinstance(default, str) and default else json.dumps(default)


def _type_text(annotation: object, constraints: Iterable[object] = ()) -> str:
    """A type as a user reads it: `number > 0 and <= 1`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [each for extra in parts[1:] for each in getattr(extra, "metadata", [extra])]
        return _type_text(parts[0], inner)
    if origin is Literal:
        return _one_of(parts)
    if origin is tuple:
        length = "" if parts[-1] is Ellipsis else f"{len(parts)}, each "
        return f"list of {length}{_type_text(parts[0])}"
    if origin is dict:
        return f"mapping of {_type_text(parts[0])} to {_type_text(parts[1])}"
    if parts:
        return " or ".join(dict.fromkeys(map(_type_text, parts)))
    return _name_of_type(annotation) + _range_text(constraints)


def _name_of_type(annotation: object) -> str:
    names: dict[object, str] = {int: "integer", float: "number", str: "text", bool: "true or false"}
    names |= {NoneType: "null"} | dict.fromkeys(_sections_in(annotation), "group of settings")
    return names[annotation]


def _range_text(constraints: Iterable[object]) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    bounds = [
        f"{sign} {_limit(getattr(each, name))}"
        for each in constraints
        for name, sign in signs.items()
        if hasattr(each, name)
    ]
    return " " + " and ".join(bounds) if bounds else ""


def _one_of(names: Iterable[object]) -> str:
    return " | ".join(map(str, names))


def _show(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _hint(key: str, value: object, allowed: str) -> str:
    """What to write instead, where the value tells what was meant."""
    if allowed == "group of settings":
        return f"; `fovea config {key}` lists them"
    if allowed.startswith("group of settings"):
        return f"; {key}={{}} takes the defaults, `fovea config {key}` lists them"
    if allowed.startswith("list") and isinstance(value, str):
        return f"; write [{value}]"
    if allowed.startswith("text") and isinstance(value, bool | int | float):
        return f"; to give it as text write '\"{_show(value)}\"'"
    if isinstance(value, str) and value.strip("+-").replace(".", "", 1).isdigit():
        return "; without the quotes it is a number"
    return ""


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


def _unknown(key: str) -> str:
    """What is wrong with a key that its section lacks, and which one may be meant."""
    owners = {setting.key: variant for variant, setting in _walk(Config, "")}
    if key in owners:
        return f"{key}: a setting of {owners[key]} only; drop it, or add {owners[key]}"
    known = sorted(other for other in {*owners, *Config.model_fields} if not key.startswith(f"{other}."))
    name = _last(key)
    near = sorted((other for other in known if _last(other) == name), key=lambda other: -_ratio(key, other))
    if not near:
        likeness = {other: max(_ratio(key, other), _ratio(name, _last(other))) for other in known}
        best = max(known, key=likeness.__getitem__)
        near = [best] if likeness[best] >= CLOSE_ENOUGH else []
    if not near:
        return f"{key}: no such setting; `fovea config` lists them all"
    return f"{key}: no such setting; did you mean {' or '.join(near[:3])}?"


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


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


def _limit(limit: object) -> str:
    """A bound of a range, without the exponent of a large integer."""
    return f"{limit:g}" if isinstance(limit, float) else str(limit)
