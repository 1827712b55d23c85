"""Counts that measure the layout of the packages: sizes, imports, settings, and files that an addition touches.

    python -m benchmarks.layout

Import rules are taken from tests/test_imports.py, and the counted files from tests/test_tests.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.printing import as_table, show
from fovea.config import backends
from fovea.config.describe import settings
from fovea.config.run import Config
from fovea_gym.settings.base import Section, sections_of
from tests.runs import ROOT
from tests.test_extending import BLOCKS
from tests.test_imports import FLOORS, PACKAGES, to_higher_rooms, to_later_packages
from tests.test_tests import FILES

GOALS = {"fovea": (46_000, 290), "fovea_gym": (17_500, None), "fovea_tools": (7_000, None)}
"""Maximum number of lines and of files of each package."""
LOSS, ENGINE, ENVIRONMENT = r"\b(cispo_loss|CispoLoss)\b", r"\b(sglang|SglangSettings)\b", r"\bGrey\b"
"""Patterns for the names of a loss, of an engine with a folder, and of the environment in docs/extending.md."""


class Count(NamedTuple):
    """One count, which is one line of the table."""

    name: str
    value: int
    goal: int | None
    """The maximum that the count should have; None without a goal."""


def counts() -> Iterator[Count]:
    """Compute all counts, in the order of the table."""
    for package, folder in PACKAGES.items():
        texts = texts_of(folder / package)
        lines, files = GOALS[package]
        yield Count(f"{package}: lines", sum(text.count("\n") for text in texts.values()), lines)
        yield Count(f"{package}: files with code", sum(map(bool, texts.values())), files)
    yield Count("names at the top of fovea/", len(set().union(*FLOORS["fovea"]) - {"__main__"}), 24)
    yield Count("imports of a later package", len(to_later_packages()), 0)
    yield Count("imports of a higher room", len(to_higher_rooms()), 0)
    for package, most in (("fovea", 5), ("fovea_tools", None)):
        yield Count(f"isinstance on engines in {package}", sum(map(len, isinstance_of_engines(package).values())), most)
    keys = {setting.key for setting in settings()}
    yield Count("settings", len(keys), 280)
    of_gym = {name for name, field in Config.model_fields.items() if any(map(is_of_gym, sections_of(field)))}
    core = [key for key in keys if key.partition(".")[0] not in of_gym]
    yield Count("settings of sections of fovea", len(core), 215)
    code = {**texts_of(ROOT / "fovea"), **texts_of(ROOT / "gym" / "fovea_gym")}
    yield Count("files to touch for a loss", len(files_that_name(LOSS, code)), 3)
    yield Count("files to touch for an engine, its folder as one", len(files_that_name(ENGINE, code)), 4)
    package_files = {name: text for name, text in BLOCKS.items() if name.endswith(".py")}
    yield Count("files to touch for an environment", len(files_that_name(ENVIRONMENT, package_files)), 1)


def texts_of(folder: Path) -> dict[str, str]:
    """Read the Python files below a folder; returns their texts by path."""
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in FILES if folder in path.parents
    }


def files_that_name(name: str, texts: Mapping[str, str]) -> set[str]:
    """The files whose code matches a name; files in a folder with that name count as one."""
    return {re.sub(rf"({name}/).*", r"\1", path) for path, text in texts.items() if re.search(name, text)}


def isinstance_of_engines(package: str) -> dict[str, list[int]]:
    """The lines in which a package tests with isinstance for the settings of an engine, by file."""
    engines = {name for name, each in vars(backends).items() if is_engine(each)}
    found: dict[str, list[int]] = {}
    for path, text in texts_of(PACKAGES[package] / package).items():
        tree = ast.parse(text)
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        imported = [each for node in imports if node.module == backends.__name__ for each in node.names]
        names = {each.asname or each.name for each in imported if each.name in engines}
        calls = [
            node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
        ]
        if lines := [call.lineno for call in calls if names & set(re.findall(r"\w+", ast.unparse(call.args[1])))]:
            found[path] = lines
    return found


def is_of_gym(section: type[Section]) -> bool:
    """True for a settings section that the gym defines."""
    return section.__module__.startswith("fovea_gym.")


def is_engine(each: object) -> bool:
    """True for a class of engine settings."""
    return isinstance(each, type) and issubclass(each, backends.EngineSettings)


def main() -> None:
    """Print the table of counts."""
    rows = [
        (each.name, f"{each.value:,}", "" if each.goal is None else f"{each.goal:,}", "" if is_met(each) else "over")
        for each in counts()
    ]
    show(as_table("layout", ("", "now", "at most", ""), rows))


def is_met(count: Count) -> bool:
    """True if a count does not exceed its goal."""
    return count.goal is None or count.value <= count.goal


if __name__ == "__main__":
    main()
