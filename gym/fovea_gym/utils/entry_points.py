"""Parts that other installed packages add by the entry points in their metadata (docs/extending.md).

Names are read from the metadata; a package is imported only when one of its names is requested.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from fovea_gym.errors import ConfigError, describe_error, result_or_error

PARTS = tuple(f"fovea.{part}" for part in ("losses", "engines", "environments", "trackers", "families"))
GROUPS = (*PARTS, "fovea.commands", "fovea.doctor", "fovea.hints")


def registered(group: str) -> Mapping[str, Sequence[EntryPoint]]:
    """The entry points of a group by name; a name with several packages is a conflict."""
    return _by_group(tuple(sys.path))[group]


def package_of(point: EntryPoint) -> str:
    """The name of an entry point's package, as pip knows it."""
    return point.dist.name if point.dist is not None else "an unnamed package"


def load(group: str, name: str, ours: Collection[str] = (), owner: str | None = None) -> Any:
    """The object that a package registers under this name; None if no package does.

    ConfigError if the name is also in `ours` and the package is not their `owner`, if two packages register the name,
    or if the import fails.
    """
    points = registered(group).get(name)
    if points is None:
        return None
    strangers = [point for point in points if package_of(point) != owner]
    packages = " and ".join(map(package_of, strangers if name in ours and strangers else points))
    if name in ours and strangers:
        raise ConfigError(
            f"{group}: {packages} registers {name}, which is one of Fovea's names; uninstall {packages}, or have it "
            "register another name"
        )
    if len(points) > 1:
        raise ConfigError(f"{group}: {packages} both register {name}; uninstall one of them")
    found, error = result_or_error(points[0].load)
    if error is not None:
        raise ConfigError(
            f"{group}: {packages} registers {name} as {points[0].value}, which cannot be imported: "
            f"it {describe_error(error)}; fix {packages}, or uninstall it"
        ) from error
    return found


def imported(group: str) -> list[str]:
    """The names of a group whose modules have been imported."""
    return [name for name, points in registered(group).items() if points[0].module in sys.modules]


def state() -> tuple[tuple[str, ...], ...]:
    """All names, and those whose modules have been imported: a cache key for results that depend on them."""
    return tuple(tuple(names) for group in PARTS for names in (registered(group), imported(group)))


@cache
def _by_group(_path: tuple[str, ...]) -> Mapping[str, Mapping[str, Sequence[EntryPoint]]]:
    """All groups on this search path; cached, since reading the metadata of 200 packages takes some 20 ms."""
    groups: dict[str, dict[str, list[EntryPoint]]] = {group: {} for group in GROUPS}
    found = entry_points()
    for group in GROUPS:
        for point in found.select(group=group):
            groups[group].setdefault(point.name, []).append(point)
    return groups
