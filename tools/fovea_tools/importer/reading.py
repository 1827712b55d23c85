"""Reads settings of another system from YAML files, from scripts and text files, and from `key=value` arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from fovea.config.recipes import COMMAND_LINE, read_yaml
from fovea_gym.errors import ConfigError
from fovea_tools.importer.elsewhere import System, systems
from fovea_tools.importer.hydra import SEARCHPATH, composed
from fovea_tools.importer.interpolation import Given, Unread
from fovea_tools.importer.shell import Word, words_of

IMPORTED = ("verl", "rlinf")
"""Systems whose settings can be imported."""
SHOWN_COUNTERPARTS = 4
"""Number of settings that an error about an unsupported or unknown file shows."""
_SETTING = re.compile(
    r"(?P<sign>\+\+|\+|~)?(?P<key>--config-\w+|[A-Za-z_]\w*(?:\.[\w@/,-]+)+)=(?P<value>.*)", re.DOTALL
)
"""A setting in Hydra's syntax: the prefix + adds a key, ~ removes one."""
_OPTIONS = {"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir"}
"""Hydra's options that name a config file, by their short forms."""


def read(words: Sequence[str]) -> dict[str, Given]:
    """The settings of files and words by key; words win over files, and later files over earlier ones.

    Raises ConfigError for a word that is neither a file nor a setting, and for a file that sets a key to two values.
    """
    joined = [word.text for word in _with_values(Word(text=word, line=0) for word in words)]
    files = [Path(word) for word in joined if "=" not in word or Path(word).is_file()]
    overrides = [word for word in joined if Path(word) not in files]
    found, last = dict[str, Given](), _over_config({each.key: each for each in map(_of_word, overrides)}, Path())
    for file in files:
        if not file.is_file():
            what = "this is a folder" if file.is_dir() else f"no such file in {Path.cwd()}"
            raise ConfigError(f"{file}: {what}; give a YAML file or a script of verl or RLinf")
        if file.suffix in (".yaml", ".yml"):
            found |= composed(file)
        else:
            settings = _by_key(each for each in _of_script(file) if each.key not in last)
            found |= _over_config(settings, file.parent)
    return found | last


def system_of(given: Iterable[str], name: str | None) -> System:
    """The system that most of the keys belong to, or the named one; ConfigError if the keys do not decide."""
    if name is not None:
        return systems()[name]
    keys = list(given)
    known = {each: sum(system.find(key) is not None for key in keys) for each, system in systems().items()}
    of_all = max(known, key=lambda each: known[each])
    first, second = sorted(IMPORTED, key=lambda each: -known[each])[:2]
    if known[of_all] > known[first]:
        raise _not_imported(systems()[of_all], known[of_all], keys)
    if not known[first]:
        raise ConfigError(
            f"{', '.join(keys[:SHOWN_COUNTERPARTS])}: neither verl nor RLinf has such settings; give a file of "
            "verl or RLinf, or key=value settings"
        )
    if known[first] == known[second]:
        raise ConfigError(
            f"{known[first]} of {len(keys)} settings are settings of {first}, and as many of {second}; choose with "
            f"--system {first} or --system {second}"
        )
    return systems()[first]


def _not_imported(system: System, num_known: int, keys: Sequence[str]) -> ConfigError:
    """The error for settings of a system that is in the table, but whose files cannot be imported."""
    found = ((key, system.find(key)) for key in keys)
    renamed = (f"{key} is {each.ours[0]}" for key, each in found if each is not None and each.ours and not each.note)
    examples = ", ".join(islice(renamed, SHOWN_COUNTERPARTS))
    return ConfigError(
        f"{num_known} of {len(keys)} settings belong to {system.title}, and only files of verl and RLinf "
        f"can be imported; write a recipe with the table that python -m fovea_tools.importer.docs {system.name} prints"
        f"{f' ({examples})' if examples else ''}"
    )


def _by_key(settings: Iterable[Given]) -> dict[str, Given]:
    found: dict[str, Given] = {}
    for each in settings:
        earlier = found.setdefault(each.key, each)
        if earlier.value != each.value:
            raise ConfigError(
                f"{each.where}: {each.text}, but {earlier.where}: {earlier.text}; remove one, or add "
                f"{each.key}=VALUE after the file"
            )
    return found


def _with_values(words: Iterable[Word]) -> Iterator[Word]:
    """The words, with Hydra's options joined to the values after them: `--config-name x` becomes `--config-name=x`."""
    rest = iter(words)
    for word in rest:
        value = next(rest, None) if word.text in (*_OPTIONS, *_OPTIONS.values()) else None
        yield word if value is None else replace(value, text=f"{_OPTIONS.get(word.text, word.text)}={value.text}")


def _over_config(settings: dict[str, Given], folder: Path) -> dict[str, Given]:
    """The settings on top of those of the config that Hydra's options among them name, if its file exists."""
    given = {option: settings[option].value for option in _OPTIONS.values() if option in settings}
    name = f"{given.get('--config-name')}.yaml"
    places = [folder / str(place) for option, place in given.items() if option != "--config-name"]
    file = next((place / name for place in places if (place / name).is_file()), None)
    if file is None:
        return settings
    searchpath = settings[SEARCHPATH].value if SEARCHPATH in settings else None
    return composed(file, searchpath) | {k: v for k, v in settings.items() if k not in given}


def _of_script(file: Path) -> Iterator[Given]:
    try:
        script = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}); give a YAML file or a script") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: not a text file in UTF-8; give a YAML file or a script") from None
    try:
        words = list(_with_values(words_of(script)))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    settings = [_setting(word.text, f"{file.name} line {word.line}", word.unread) for word in words]
    if not any(settings):
        _refuse_options([word.text for word in words])
    yield from filter(None, settings)


def _refuse_options(words: Sequence[str]) -> None:
    """Raise ConfigError if options among the words are settings of a system whose files cannot be imported."""
    keys = [word.removeprefix("--").partition("=")[0] for word in words if word.startswith("--")]
    others = [system for name, system in systems().items() if name not in IMPORTED]
    num_known = [sum(system.find(key) is not None for key in keys) for system in others]
    if most := max(num_known):
        raise _not_imported(others[num_known.index(most)], most, keys)


def _of_word(word: str) -> Given:
    setting = _setting(word, COMMAND_LINE, "")
    if setting is None:
        raise ConfigError(
            f"{COMMAND_LINE}: {word}: neither a file nor a setting; give a file, or settings of verl or RLinf as "
            "key=value"
        )
    return setting


def _setting(word: str, where: str, unread: str) -> Given | None:
    found = _SETTING.fullmatch(word)
    if found is None:
        return None
    key, text = found["key"], found["value"]
    if found["sign"] == "~":
        return Given(key=f"~{key}", value=text, where=where)
    return Given(key=key, value=Unread(text=text, reason=unread) if unread else _value(text), where=where)


def _value(text: str) -> object:
    """The value of a word; Hydra accepts some texts without quotes that YAML does not, such as `.*visual.*` or `*`."""
    try:
        return read_yaml(text, "word")
    except ConfigError:
        return text


def where_of(given: Mapping[str, Given]) -> list[str]:
    """The files that the settings come from, each once and without line numbers."""
    places = dict.fromkeys(each.where.partition(" line ")[0] for each in given.values())
    return [place for place in places if place != COMMAND_LINE]
