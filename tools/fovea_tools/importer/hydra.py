"""Settings of a YAML file and of the files in its Hydra `defaults` list, as far as they are in its config folders.

These folders are the file's own and those of its `hydra.searchpath` that exist on this machine. For the list's rules
see https://hydra.cc/docs/advanced/defaults_list/, for the packages of settings
https://hydra.cc/docs/advanced/overriding_packages/. Files are read as YAML; Hydra itself does not run.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from fovea.config.recipes import read_recipe
from fovea_gym.errors import ConfigError
from fovea_gym.settings.base import Tree, leaves
from fovea_gym.settings.type_text import show
from fovea_tools.importer.interpolation import Given, resolve

DEFAULTS, ITSELF, SEARCHPATH = "defaults", "_self_", "hydra.searchpath"
_NESTED_AT_MOST = 50
"""Largest depth of files that name files; deeper ones are taken for a circle."""
_MOST_FILES = 1000
"""Largest number of files of one config, which can grow exponentially when each file names two others."""
_HEADER = re.compile(r"^#\s*@package\s+([\w.]+)\s*$", re.MULTILINE)
_KEYWORD = re.compile(r"(?:(optional|override)\s+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Config:
    """A file in a config folder."""

    file: Path
    roots: tuple[Path, ...]
    """Config folders; the first one that has a file wins."""
    name: str
    """Path relative to its root, with its suffix."""
    package: str
    """The dotted key that its settings are placed under; empty for the top level."""

    def key(self, name: str) -> str:
        """The full key of a name within its package."""
        return f"{self.package}.{name}" if self.package else name


def composed(file: Path, searchpath: object = None) -> dict[str, Given]:
    """The settings of a YAML file and of those that it names, by key; later files of a list win over earlier ones.

    `searchpath` replaces the file's own `hydra.searchpath`. Entries of the list whose file is not found become the
    value of `defaults`. Raises ConfigError for files that name each other in a circle.
    """
    found: dict[str, Given] = {}
    unread: list[str] = []
    own = leaves(read_recipe(file)).get(SEARCHPATH)
    roots = (file.parent, *_folders(own if searchpath is None else searchpath, file))
    top = _Config(file=file, roots=roots, name=file.name, package="")
    for each in _settings(top, unread, depth=0, opened=count(1)):
        _put(found, each)
    if unread:
        found[DEFAULTS] = Given(key=DEFAULTS, value=unread, where=file.name)
    return found


def _folders(searchpath: object, file: Path) -> Iterator[Path]:
    """The existing folders of a search path; relative ones are below the working directory, as in Hydra.

    They may also be below a folder around the file, in case the command is meant to start there.
    """
    for entry in searchpath if isinstance(searchpath, list) else []:
        scheme, _, path = str(resolve(entry, SEARCHPATH, lambda _: None, variables=None)).rpartition("://")
        places = [base / path for base in (Path(), *file.resolve().parents)]
        folder = next(filter(Path.is_dir, places), None)
        if folder is not None and path and scheme in ("", "file"):
            yield folder


def _put(found: dict[str, Given], setting: Given) -> None:
    """Add a setting; a value replaces a section of the same name, and a section replaces a value."""
    inner = [key for key in found if key.startswith(f"{setting.key}.")]
    if setting.value == {} and inner:
        return
    outer = [setting.key.rsplit(".", dots)[0] for dots in range(1, setting.key.count(".") + 1)]
    for key in (*inner, *outer):
        found.pop(key, None)
    found[setting.key] = setting


def _settings(config: _Config, unread: list[str], depth: int, opened: Iterator[int]) -> Iterator[Given]:
    """The settings of a file and of the files that it names; `opened` counts the files of the whole config."""
    if next(opened) > _MOST_FILES:
        raise ConfigError(f"{config.file}: `defaults` lists name more than {_MOST_FILES} files; name fewer")
    if depth > _NESTED_AT_MOST:
        raise ConfigError(f"{config.file}: the files of `defaults` name each other in a circle; remove one of them")
    tree = read_recipe(config.file)
    entries = tree.pop(DEFAULTS, None) or []
    if not isinstance(entries, list):
        raise ConfigError(
            f"{config.file}: defaults={show(entries)}: it must be a list of files, as in Hydra; write one"
        )
    names = [name for entry in entries for name in _names(entry)]
    for name in names if ITSELF in names else [*names, ITSELF]:
        if name == ITSELF:
            yield from _own(config, tree)
        else:
            yield from _of(config, name, unread, depth, opened)


def _own(config: _Config, tree: Tree) -> Iterator[Given]:
    for key, value in leaves(tree).items():
        # OmegaConf marks values that must be set elsewhere with ???, and Hydra names the class of a section in _target_
        if value != "???" and not key.endswith("_target_"):
            yield Given(key=config.key(key), value=value, where=config.name)


def _names(entry: Any) -> Iterator[str]:
    """An entry of a list as `folder/name@package`, one for each file that it selects."""
    if not isinstance(entry, dict):
        yield str(entry)
        return
    for group, options in entry.items():
        name, at, package = str(group).partition("@")
        for option in options if isinstance(options, list) else [options]:
            if option is not None and not _KEYWORD.sub("", name, count=1).lstrip("/").startswith("hydra/"):
                yield f"{name}/{option}{at}{package}"


def _of(config: _Config, entry: str, unread: list[str], depth: int, opened: Iterator[int]) -> Iterator[Given]:
    """Yield the settings of the file that an entry names; if there is no such file, add the entry to `unread`."""
    keyword = _KEYWORD.match(entry)
    assert keyword is not None, "the expression also matches an empty text"
    name, _, package = entry[keyword.end() :].partition("@")
    folder = "" if name.startswith("/") else posixpath.dirname(config.name)
    path = posixpath.normpath(posixpath.join(folder, name.lstrip("/"))).removesuffix(".yaml") + ".yaml"
    file = next((root / path for root in config.roots if (root / path).is_file()), None)
    if keyword[1] != "override" and not path.startswith("../") and file is not None:
        package = package or _package_of(file) or posixpath.dirname(name.lstrip("/")).replace("/", ".")
        chosen = _Config(file=file, roots=config.roots, name=path, package=_within(config, package))
        yield from _settings(chosen, unread, depth + 1, opened)
    elif keyword[1] != "optional":
        unread.append(entry)


def _package_of(file: Path) -> str:
    """The package that a file declares in a comment; empty if it declares none."""
    header = _HEADER.search(file.read_text(encoding="utf-8"))
    return "" if header is None or header[1] == "_group_" else header[1]


def _within(config: _Config, package: str) -> str:
    """The full key of a package as it is named in a config file."""
    if package == "_here_":
        return config.package
    if package.startswith("_global_"):
        return package.removeprefix("_global_").lstrip(".")
    return config.key(package) if package else config.package
