"""The Dockerfiles as far as they can be checked where no image can be built: their files, pins and extras."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
INSTRUCTIONS = {"FROM", "ENV", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT", "CMD"}


def instructions(file: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile in order: name and arguments, continued lines joined."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined if line.strip())]


def test_there_is_one_without_and_one_with_cuda() -> None:
    assert [file.stem for file in FILES] == ["cpu", "cuda"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_image_copies_installs_and_runs_what_there_is(file: Path) -> None:
    found = instructions(file)
    names = [name for name, _ in found]
    assert set(names) <= INSTRUCTIONS
    assert names[0] == "FROM"
    copied = [source for name, rest in found if name == "COPY" for source in shlex.split(rest)[:-1]]
    sent = set((ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines())
    assert all((ROOT / source).exists() and f"!{source}" in sent for source in copied)
    # what hatchling reads to build the wheel
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    read = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    assert read | set(wheel["packages"]) | set(wheel["force-include"]) <= set(copied)
    # extras at the pins
    (install,) = [rest for name, rest in found if name == "RUN" and "pip install" in rest]
    assert " -c constraints.txt " in install
    (asked,) = re.findall(r"'\.\[([\w,]+)\]'", install)
    assert set(asked.split(",")) <= set(project["project"]["optional-dependencies"])
    # the command without rights
    assert ("USER", "fovea") in found
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert ("ENTRYPOINT", '["fovea"]') in found
