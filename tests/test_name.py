"""Nobody is told to install `fovea`: on PyPI that is another project; this distribution is called fovea-rl."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import fovea

ROOT = Path(__file__).parent.parent
HISTORY = {"CHANGELOG.md", "docs/log.md", "docs/decisions/039-a-name-for-the-distribution.md", "tests/test_name.py"}
"""Files that may name the other project: they tell what was, or why."""
OTHERS = re.compile(
    r"""(?<![\w./-])fovea\[[a-z]                                      # fovea[hub]
    |(?:\bpipx?\ install|\buv\ (?:add|pip\ install|tool\ install)|\buvx)  # pip install -U fovea
     (?:\ -\S+)*\ ['"]?fovea(?![\w/-])""",
    re.VERBOSE,
)


def texts() -> dict[str, str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    files = {name: ROOT / name for name in listed.split("\0") if name and name not in HISTORY}
    contents = {name: file.read_bytes() for name, file in files.items() if file.is_file()}
    return {name: content.decode() for name, content in contents.items() if b"\0" not in content}


def test_no_text_offers_the_other_project() -> None:
    found = [
        f"{name}:{text.count(chr(10), 0, hit.start()) + 1}: {hit.group()}"
        for name, text in texts().items()
        for hit in OTHERS.finditer(text)
    ]
    assert not found


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("needs fovea[hub]", True),
        ("pip install 'fovea[hub]'", True),
        ("pip install fovea", True),
        ("pip install -U --quiet fovea==0.1", True),
        ("uvx fovea", True),
        ("pip install 'fovea-rl[hub]'", False),
        ("pip install fovea-rl", False),
        ("pip install -e /src/fovea/", False),
        ("pip install x && fovea", False),
    ],
)
def test_such_a_text_is_found_and_no_other(text: str, is_found: bool) -> None:
    assert bool(OTHERS.search(text)) is is_found


def test_the_project_is_called_otherwise_and_its_extras_name_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == "fovea-rl"
    assert project["scripts"] == {"fovea": "fovea.cli.main:main"}


def test_the_version_is_the_newest_of_the_changelog() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[:2] == ["Unreleased", fovea.__version__]
