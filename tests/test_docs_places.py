"""Settings, files and tests that the documents name are there, and every page can be found."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from fovea.config.describe import describe
from fovea_gym.errors import ConfigError

ROOT = Path(__file__).parent.parent
PACKAGES = (ROOT / "fovea", ROOT / "gym/fovea_gym", ROOT / "tools/fovea_tools")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CURRENT = [page for page in PAGES if page.name != "log.md"]
"""Pages that describe today's code; the log names files and settings of its dates."""
SECTIONS = {setting.key.partition(".")[0] for setting in describe() if "." in setting.key}
SETTING = re.compile(r"`(?P<key>[a-z_]+(?:\.[a-z_0-9]+)+)(?:=[^`\n]*)?`")
NO_SETTING = re.compile(r"\.(?:py|json|parquet|safetensors)$|\.engine_args\.|^reward_model\.ground_truth$")
"""Names of files, an engine's own arguments, and a column of verl's."""
FILE = re.compile(r"`(?P<path>[\w./-]+/[\w.-]+\.(?:py|yaml|md|lock))(?:::(?P<test>\w+))?`")
LINK = re.compile(r"\]\((?P<path>[^)\s#:]+)(?:#[^)\s]*)?\)")
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
PLACEHOLDERS = ("NAME", "path/to/", "docs/from-")


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text(encoding="utf-8"))


@cache
def functions_of(file: Path) -> set[str]:
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def place(path: str, page: Path) -> Path | None:
    """The file that a page names from the root, from the package or from its own folder; None if there is none."""
    return next((root / path for root in (ROOT, *PACKAGES, page.parent) if (root / path).exists()), None)


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    missing = []
    for found in FILE.finditer(prose(page)):
        file = place(found["path"], page)
        if any(word in found["path"] for word in PLACEHOLDERS):
            continue
        if file is None or (found["test"] is not None and found["test"] not in functions_of(file)):
            missing.append(found.group())
    for key in sorted({found["key"] for found in SETTING.finditer(prose(page))}):
        if key.partition(".")[0] in SECTIONS and not NO_SETTING.search(key):
            try:
                describe(key)
            except ConfigError as error:
                missing.append(str(error))
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_link_leads_to_a_file(page: Path) -> None:
    paths = [found["path"] for found in LINK.finditer(prose(page))]
    assert [path for path in paths if not (page.parent / path).exists()] == []


def test_every_fault_names_a_test() -> None:
    rows = re.findall(
        r"^\| (?!fault|out of memory in|code|---|\d).*$", (ROOT / "docs/faults.md").read_text(), re.MULTILINE
    )
    assert len(rows) > 25
    assert [row for row in rows if not re.search(r"`tests/[\w/]+\.py::test_\w+` \|$", row)] == []


def test_the_documents_are_short() -> None:
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    decisions = (ROOT / "docs" / "decisions").glob("*.md")
    assert [page.name for page in decisions if words[page] > 250] == []
    assert words[ROOT / "README.md"] <= 900
    assert sum(words[page] for page in (ROOT / "docs").glob("*.md") if page.name != "log.md") <= 40_000


def test_the_list_of_files_for_a_new_part_names_what_they_hold() -> None:
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \w* ?\| `(fovea/[a-z_/]+\.py)` \| (.*) \|$", page, re.MULTILINE)
    named = [(path, name) for path, change in rows for name in re.findall(r"`([\w.]+)`", change)]
    assert len(named) > 5
    assert [pair for pair in named if pair[1] not in (ROOT / pair[0]).read_text(encoding="utf-8")] == []


def test_every_page_is_in_the_menu_and_linked_from_another() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    linked = {(page.parent / found["path"]).resolve() for page in PAGES for found in LINK.finditer(prose(page))}
    pages = sorted((ROOT / "docs").glob("*.md"))
    assert [page.name for page in pages if not re.search(rf"\b{re.escape(page.name)}$", menu, re.MULTILINE)] == []
    assert [page.name for page in pages if page not in linked] == []
