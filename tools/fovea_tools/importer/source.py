"""The settings of a run of another system, as the rules read them, and the recipe lines that the rules return."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

from fovea_gym.errors import ConfigError
from fovea_gym.settings.type_text import show
from fovea_tools.importer.elsewhere import Counterpart, System
from fovea_tools.importer.interpolation import Given, Unread, resolve

T = TypeVar("T")
_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: value in (True, False),  # 0 and 1 too
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "positive integer": lambda value: _TYPES["integer"](value) and value > 0,
    "number": lambda value: isinstance(value, float) or _TYPES["integer"](value),
    "text": lambda value: isinstance(value, str),
    "list of texts": lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
}
"""Checks of the value types in elsewhere.yaml, which joins several types by ` or `."""

_LONGEST_CHAIN = 50
"""Largest number of settings in a chain of references."""

TRACKERS = {"mlflow": "log.mlflow_experiment", "swanlab": "log.swanlab_project", "wandb": "log.wandb_project"}
"""The setting of the project name of each tracker, by its name in the other systems' lists of loggers."""

EnvironmentName: TypeAlias = Literal["geo3k", "vqa", "caption"]
"""Environments whose rows are in files, as in the other systems."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeLine:
    """One setting of the recipe, and its source."""

    key: str
    value: Any
    source: str
    read: tuple[str, ...]
    """The other system's keys that its value was computed from."""
    is_given: bool
    """True if at least one of those keys is set, rather than left at its default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A given setting that is not in the recipe."""

    key: str
    reason: str
    matters: bool
    """True if the run changes without it."""


class Unusable(Exception):
    """Raised for a value of the wrong type: all settings that are computed from it are left out."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.left = LeftOut(key=key, reason=reason, matters=True)


Rule: TypeAlias = Callable[["SourceConfig"], Iterator[RecipeLine | LeftOut]]
"""A function that translates several settings of the other system together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    """The given settings on top of the defaults of their system."""

    system: System
    given: Mapping[str, Given]
    environment: EnvironmentName | None = None
    """The environment that the user named, if the settings do not name one."""
    count_gpus: Callable[[], int] = lambda: 0
    """Counts the GPUs of this machine, for settings that mean all of them."""
    _resolved: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Cache of resolved values: references may lead to the same key in many ways."""

    def value(self, key: str) -> Any:
        """The value of a key with its references replaced, or its default; None if it is null or has neither.

        Raises ConfigError for a value that cannot be determined, and Unusable for a value of the wrong type.
        """
        return self._value(key, ())

    def _value(self, key: str, through: tuple[str, ...]) -> Any:
        """The value of a key that references reach through the keys in `through`."""
        if key in through:
            circle = " -> ".join([*through[through.index(key) :], key])
            raise ConfigError(f"{circle}: these settings refer to each other in a circle; set one of them to a value")
        if key in self._resolved:
            return self._resolved[key]
        if len(through) > _LONGEST_CHAIN:
            raise ConfigError(
                f"{through[0]}: its references lead through more than {_LONGEST_CHAIN} settings; set it to a value"
            )
        given, known = self.given.get(key), self.system.find(key)
        if given is None:
            return known.default if known is not None and known.theirs == key else None
        if isinstance(given.value, Unread):
            raise ConfigError(f"{given.where}: {given.text}: {given.value.reason}; add {key}=VALUE after the file")
        value = resolve(given.value, key, lambda other: self._value(other, (*through, key)))
        if known is not None and known.type and not any(_TYPES[each](value) for each in known.type.split(" or ")):
            raise Unusable(key, f"{show(value)} is not a {known.type}")
        self._resolved[key] = value
        return value

    def one_of(self, key: str, ours: Mapping[str, T], kind: str) -> T:
        """The counterpart of a key's value; ConfigError if it has none, since the recipe needs it."""
        value = self.value(key)
        if not isinstance(value, str) or value not in ours:
            raise self.refuse(key, f"no such {kind} exists here; set it to one of {', '.join(ours)}")
        return ours[value]

    def is_given(self, *keys: str) -> bool:
        return any(key in self.given for key in keys)

    def line(self, key: str, value: Any, *read: str, why: str = "") -> RecipeLine:
        """A recipe line computed from the keys in `read`; `why` adds what they do not show."""
        source = "; ".join([*filter(None, map(self._source, read)), *([why] if why else [])])
        return RecipeLine(key=key, value=value, source=source, read=read, is_given=self.is_given(*read))

    def same(self, ours: str, key: str) -> RecipeLine:
        """A recipe line with the value of one key."""
        return self.line(ours, self.value(key), key)

    def left(self, key: str, reason: str, *, matters: bool = True) -> Iterator[LeftOut]:
        """Record a given key that has no counterpart here."""
        if key in self.given:
            yield LeftOut(key=key, reason=reason, matters=matters)

    def refuse(self, key: str, reason: str) -> ConfigError:
        """The error for a value without which no recipe can be written."""
        given = self.given.get(key)
        said = (
            f"{given.where}: {given.text}" if given else f"{key}={show(self.value(key))}, {self.system.title}'s default"
        )
        return ConfigError(f"{said}: {reason}")

    def _source(self, key: str) -> str:
        if key in self.given:
            given = self.given[key]
            resolved = show(self.value(key))
            became = "" if given.text == f"{key}={resolved}" else f" = {resolved}"
            return f"{given.text}{became} ({given.where})"
        found = self.system.find(key)
        has_default = found is not None and found.has_default
        return f"{key}={show(self.value(key))} ({self.system.title}'s default)" if has_default else ""


def trackers(
    source: SourceConfig, key: str, project: str, default_project: str | None = None, needless: Sequence[str] = ()
) -> Iterator[RecipeLine | LeftOut]:
    """Translate a list of loggers; `needless` are loggers whose output Fovea always writes."""
    named = source.value(key)
    if named is None:
        return
    names = [named] if isinstance(named, str) else list(named)
    yield source.line("log.tensorboard", "tensorboard" in names, key)
    for name in sorted(TRACKERS.keys() & set(names)):
        yield source.line(TRACKERS[name], source.value(project) or default_project, key, project)
    others = sorted(set(names) - {"tensorboard", *needless, *TRACKERS})
    if others:
        yield from source.left(
            key, f"{', '.join(others)} not supported; metrics.jsonl in the run folder has every metric"
        )


def epochs_and_steps(source: SourceConfig, epochs: str, total: str, *, has_steps: bool) -> Iterator[RecipeLine]:
    """Translate the end of a run: the epochs decide if `total` sets no number of steps."""
    if source.value(epochs) is not None:
        yield source.same("max_epochs", epochs)
    if has_steps:
        yield source.same("max_steps", total)
    else:
        yield source.line("max_steps", 1_000_000, total, why="the epochs end the run earlier")


def by_tokens_or_groups(
    source: SourceConfig, by_tokens: str, tokens: str, rows: str, group: str
) -> Iterator[RecipeLine | LeftOut]:
    """Translate the size of micro-batches: tokens, or completions if they make a whole number of groups."""
    completions, of_one = source.value(rows), source.value(group)
    if source.value(by_tokens):
        yield source.line("train.enable_dynamic_batch_size", True, by_tokens)
        if source.value(tokens) is not None:
            yield source.same("train.max_tokens_per_microbatch", tokens)
    elif completions is not None and of_one and completions % of_one == 0:
        yield source.line("train.enable_dynamic_batch_size", False, by_tokens)
        yield source.line("train.groups_per_microbatch", completions // of_one, rows, group)
    else:
        yield from source.left(rows, f"it counts completions, and is not a multiple of the group size {of_one}")


def kl_in_loss(
    source: SourceConfig, switch: str, coef: str, kind: str, estimators: Mapping[str, str]
) -> Iterator[RecipeLine]:
    """Translate a KL term of the loss, which is off if its `coef` is 0; `switch` is the key that turns it on."""
    if not source.value(coef):
        yield source.line("algorithm.kl", None, *dict.fromkeys((switch, coef)))
        return
    yield source.line("algorithm.kl.name", "loss", switch)
    yield source.same("algorithm.kl.coef", coef)
    yield source.line("algorithm.kl.estimator", source.one_of(kind, estimators, "estimator"), kind)


def plain(source: SourceConfig, setting: Counterpart) -> Iterator[RecipeLine | LeftOut]:
    """Translate a setting without a rule."""
    key = setting.theirs
    if setting.none:
        for given in (each for each in source.given if source.system.find(each) == setting):
            matters = setting.harmless != "any" and source.value(given) not in (None, *setting.harmless)
            yield LeftOut(key=given, reason=setting.none, matters=matters)
    elif not all(source.value(other) == value for other, value in setting.when.items()):
        return
    elif source.is_given(key) or setting.has_default:
        value = source.value(key)
        if setting.values is not None and value is not None:
            if value not in list(setting.values):  # a list cannot be a key of the mapping, so it is refused too
                allowed = ", ".join(map(show, setting.values))
                yield from source.left(key, f"only {allowed} have a counterpart in {setting.ours[0]}")
                return
            value = setting.values[value]
        if setting.special is not None and value in list(setting.special):
            value = setting.special[value]
        for ours in setting.ours if value is not None else ():
            yield source.line(ours, value, key)
