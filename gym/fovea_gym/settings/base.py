"""The base class of every section of the settings (`fovea.config.run`), and the short forms of sections."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, TypeVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WrapValidator,
    model_validator,
)
from pydantic.fields import FieldInfo

from fovea_gym.errors import ConfigError
from fovea_gym.utils import entry_points
from fovea_gym.utils.addresses import http_parts
from fovea_gym.utils.installing import GYM

T = TypeVar("T")
Tree: TypeAlias = dict[str, Any]
"""Nested mappings of plain values, as YAML returns them."""

Fraction: TypeAlias = Annotated[float, Field(ge=0, le=1)]
PositiveInt: TypeAlias = Annotated[int, Field(ge=1)]
NonNegativeInt: TypeAlias = Annotated[int, Field(ge=0)]
PositiveFloat: TypeAlias = Annotated[float, Field(gt=0)]
FiniteFloat: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
NonNegativeFloat: TypeAlias = Annotated[float, Field(ge=0)]
Coefficient: TypeAlias = Annotated[float, Field(gt=0, le=1e6)]
"""A factor of a term of the loss or the reward; gradients would overflow with a much larger one."""
CoefficientOrZero: TypeAlias = Annotated[float, Field(ge=0, le=1e6)]
LearningRate: TypeAlias = Annotated[float, Field(gt=0, le=100)]
Seconds: TypeAlias = Annotated[float, Field(gt=0, le=1e8)]
"""A time limit of at most three years; clocks of the operating system overflow at larger ones."""
RowCount: TypeAlias = Annotated[int, Field(ge=1, le=1 << 24)]
"""Number of rows of a generated split, or of samples per step; each takes memory."""
TokenCount: TypeAlias = Annotated[int, Field(ge=1, le=1 << 20)]
"""Number of tokens of one text."""
NumThreads: TypeAlias = Annotated[int, Field(ge=1, le=1024)]
"""Number of threads or processes that run at once."""


def _can_be_called(url: str) -> str:
    if http_parts(url) is None:
        raise AssertionError(url)  # not ValueError, whose text would replace the description of what is allowed
    return url


HttpUrl: TypeAlias = Annotated[str, AfterValidator(_can_be_called)]
"""An address with a host and, optionally, a port from 1 to 65535."""

MAY_CHANGE = "may change on resume"


class _MayChange:
    """A mark that is also written to the JSON schema."""

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), MAY_CHANGE: True}


MayChange: TypeAlias = Annotated[T, _MayChange()]
"""A setting or section that may change when a run is resumed: it controls where and in what pieces results are computed
or written, or it paces the optimizer, which is how to rescue a run that diverges."""

_DEEPEST = 50
"""Maximum nesting of mappings and lists; Fovea's own settings nest four deep."""
NAME = "name"
"""The field that chooses the section of a union, or a bundle; a text instead of a section is short for this field."""


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Alternative names, such as those of other trainers, with the settings that each stands for."""
    bundles: ClassVar[Mapping[str, Tree]] = {}
    """The settings that each value of the section's `name` sets."""
    short_lists: ClassVar[tuple[str, ...]] = ()
    """Names of lists for which a single text is short for a list with one entry."""
    entry: ClassVar[FieldInfo | None] = None
    """The field of every other name, in a section whose names the user chooses."""

    @classmethod
    def field_of(cls, name: str) -> FieldInfo | None:
        """The field of this name; None for an unknown name."""
        return cls.model_fields.get(name, cls.entry)

    @classmethod
    def completed(cls, given: Tree) -> Tree:
        """The given settings in their long forms; a union without a name becomes its first section."""
        return {key: _named(cls.field_of(key), value) for key, value in long_forms(cls, given).items()}

    def contradictions(self) -> Iterator[str]:
        """Yield an error text for each conflict of settings; the section's own settings are written as `.level`."""
        yield from ()

    @model_validator(mode="after")
    def _agree(self) -> Self:
        refuse(self.contradictions(), type(self).model_fields)
        return self

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        return cls.completed(given) if isinstance(given, dict) else given


class Member(Section):
    """A section of a union, chosen by its `name`."""

    name: str
    """Name of this section, which chooses it."""


@dataclass(frozen=True, slots=True)
class OpenUnion:
    """Mark of a union of sections to which other packages can add sections, by the entry points of `group`.

    The union lists Fovea's sections, each with a fixed `name`, and the base class for sections of other packages.
    A package is imported when a setting names its section.
    """

    group: str
    method: str
    """Method with which a section of another package makes its object."""

    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> Any:
        ours = [*_ours(union), *({NoneType} & set(get_args(union)))]
        closed: Any = reduce(or_, ours)
        chosen = Annotated[closed, Field(discriminator=NAME)] if len(ours) > 1 else closed

        def validated(value: Any, of_ours: Callable[[Any], Any]) -> Any:
            name = value.get(NAME) if isinstance(value, dict) else getattr(value, NAME, None)
            section = self.section(union, name) if isinstance(name, str) else None
            return of_ours(value) if section is None else section.model_validate(value, strict=True)

        schema = handler.generate_schema(Annotated[chosen, WrapValidator(validated)])
        # serialize as any: a section of another package is written with all of its settings
        return {**schema, "serialization": {"type": "any"}}

    def section(self, union: Any, name: str) -> type[Section] | None:
        """The section of this name in another package, which is imported; None if no package registers it."""
        found = entry_points.load(self.group, name, _names(_ours(union)))
        if found is None:
            return None
        (base,) = [each for each in _sections_in(union) if not _has_a_fixed_name(each)]
        fits = isinstance(found, type) and issubclass(found, base) and _names(_ours(found)) == [name]
        if not fits or getattr(found, self.method, None) in (None, getattr(base, self.method, None)):
            raise ConfigError(
                f"{self.group}: {name} is registered as {found!r}, which does not fit; register a class that derives "
                f"from {base.__module__}.{base.__name__}, with the line `name: Literal[{name!r}] = {name!r}` and a "
                f"method {self.method} (docs/extending.md)"
            )
        section: type[Section] = found
        return section

    def imported(self, union: Any) -> Iterator[type[Section]]:
        """The sections of packages that have been imported, except those that `section` refuses."""
        for name in entry_points.imported(self.group):
            with suppress(ConfigError):
                if (section := self.section(union, name)) is not None:
                    yield section


def long_forms(section: type[Section], given: Tree) -> Tree:
    """The settings of a section with aliases replaced by the settings that they stand for, and short forms by sections.

    Short forms: a text for a union chooses one of its sections, and `path/to/file.py:Class` a custom environment; a
    text for a section with bundles chooses a bundle; true stands for the defaults of an optional section, and false for
    its absence. ValueError if an alias and a setting that it stands for are both set.
    """
    for alias in section.aliases.keys() & given.keys():
        names = section.aliases[alias]
        if set(names) & given.keys():
            raise ValueError(f"{alias} stands for {' and '.join(names)}, and both are set; drop one of them")
        given = {key: value for key, value in given.items() if key != alias} | dict.fromkeys(names, given[alias])
    return {key: _long_form(section.field_of(key), value) for key, value in given.items()}


def _long_form(field: FieldInfo | None, value: Any) -> Any:
    if field is None or not sections_of(field):
        return value
    if isinstance(value, str) and (is_union(field) or any(section.bundles for section in sections_of(field))):
        own = ".py" in value and "own" in variants_of(field)
        return {NAME: "own", "file": value} if own else {NAME: value}
    if isinstance(value, bool) and NoneType in get_args(field.annotation):
        return {} if value else None
    return value


def file_meant(value: str) -> str | None:
    """`clocks.py:Clocks` for `clocks:Clocks` if the file exists; None for other values."""
    file, _, name = value.rpartition(":")
    is_meant = bool(file) and name.isidentifier() and Path(f"{file}.py").expanduser().is_file()
    return f"{file}.py:{name}" if is_meant else None


def _named(field: FieldInfo | None, value: Any) -> Any:
    if isinstance(value, list):
        # strict validation accepts only a tuple for a tuple, and YAML has no tuples
        return tuple(value)
    ours = _ours(field.annotation) if field is not None and isinstance(value, dict) else []
    return {NAME: _names(ours)[0], **value} if ours else value


def sections_of(field: FieldInfo) -> tuple[type[Section], ...]:
    """The sections that a field may hold, including those of imported packages; empty for a plain setting."""
    named, union = tuple(_sections_in(field.annotation)), _open_union(field)
    if union is None:
        return named
    return (*_ours(field.annotation), *union.imported(field.annotation)) or named


def _sections_in(annotation: object) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in get_args(annotation):
        yield from _sections_in(part)


def is_union(field: FieldInfo) -> bool:
    """True if the field holds one of several sections, chosen by `name`."""
    return _open_union(field) is not None or bool(_ours(field.annotation))


def variants_of(field: FieldInfo) -> dict[str, type[Section]]:
    """The sections of `sections_of` by the name that chooses each; empty if there is nothing to choose."""
    named = [section for section in sections_of(field) if _has_a_fixed_name(section)]
    return dict(zip(_names(named), named, strict=True))


def variant_of(field: FieldInfo, name: object) -> type[Section] | None:
    """The section that this name chooses, which may belong to another package; None for an unknown name."""
    if not isinstance(name, str):
        return None
    union = _open_union(field)
    theirs = None if union is None else union.section(field.annotation, name)
    return theirs or variants_of(field).get(name)


def names_of(field: FieldInfo) -> list[str]:
    """All names of a union, including those in packages that have not been imported."""
    union = _open_union(field)
    registered = () if union is None else entry_points.registered(union.group)
    return list(dict.fromkeys([*_names(_ours(field.annotation)), *registered]))


def packages_of(field: FieldInfo) -> list[str]:
    """The names of a union's sections in packages that are not part of Fovea; no package is imported."""
    union = _open_union(field)
    points = {} if union is None else entry_points.registered(union.group)
    # leave out the examples, which the gym itself registers by entry points
    return [name for name, (point, *_) in points.items() if entry_points.package_of(point) != GYM]


def default_name(field: FieldInfo) -> str | None:
    """The name of a union's first section; None if all sections are in other packages."""
    return next(iter(_names(_ours(field.annotation))), None)


def _open_union(field: FieldInfo) -> OpenUnion | None:
    return next((each for each in field.metadata if isinstance(each, OpenUnion)), None)


def _ours(annotation: object) -> list[type[Section]]:
    return [section for section in _sections_in(annotation) if _has_a_fixed_name(section)]


def _names(sections: Iterable[type[Section]]) -> list[str]:
    return [section.model_fields[NAME].default for section in sections]


def _has_a_fixed_name(section: type[Section]) -> bool:
    field = section.model_fields.get(NAME)
    return field is not None and get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1


def over(below: Tree, above: Tree) -> Tree:
    """Merge settings into others, section by section; another member of a union replaces the whole section."""
    merged = dict(below)
    for key, value in above.items():
        under: Any = below.get(key)
        both = isinstance(value, dict) and isinstance(under, dict)
        same = both and value.get(NAME, under.get(NAME)) == under.get(NAME)
        merged[key] = over(under, value) if same else value
    return merged


def leaves(tree: Tree, path: str = "") -> Tree:
    """The values of nested mappings by dotted key; an empty mapping counts as a value."""
    found: Tree = {}
    for name, value in tree.items():
        is_section = isinstance(value, dict) and value
        found |= leaves(value, f"{path}{name}.") if is_section else {f"{path}{name}": value}
    return found


def nested(path: Iterable[str], value: object) -> Tree:
    """A value in nested mappings: `{a: {b: value}}` for the path `a`, `b`."""
    first, *below = path
    return {first: nested(below, value) if below else value}


def check_depth(value: object, where: str, depth: int = 0) -> None:
    """Raise ConfigError naming `where` for a value that is nested too deeply, for instance because it holds itself."""
    if depth > _DEEPEST:
        raise ConfigError(f"{where}: is nested more than {_DEEPEST} levels deep, or holds itself; flatten it")
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for each in inside:
        check_depth(each, where, depth + 1)


class ContradictionError(ValueError):
    """Settings of a section contradict each other; the text names them relative to the section."""

    def __init__(self, text: str, names: Iterable[str]) -> None:
        """`text` refers to the settings `names` as `.level`, at its beginning or after a blank or a bracket."""
        self._text = text
        self._name = re.compile(rf"(?<![^\s(])\.(?=(?:{'|'.join(map(re.escape, names))})\b)")
        super().__init__(self.below(""))

    def below(self, key: str) -> str:
        """The text with the full names of settings, for a section at this key."""
        return self._name.sub(f"{key}." if key else "", self._text)


def refuse(complaints: Iterable[str], names: Iterable[str]) -> None:
    """Raise ContradictionError with all complaints, if there are any; `names` are the settings of the section."""
    if found := list(complaints):
        raise ContradictionError("; also: ".join(found), names)
