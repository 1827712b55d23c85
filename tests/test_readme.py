"""The commands of the README, in its order and in one folder, as a newcomer pastes them; only sizes are smaller."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FOVEA = f"""#!{sys.executable}
# the command, with small sizes for what trains
import os
import sys

sizes = ["max_steps=3", "rollout.prompts_per_step=8", "rollout.samples_per_prompt=4", "parity.prompts=1"]
sizes += ["evaluate.test_size=16", "evaluate.dev_size=8", "warmup.max_steps=3"]
scenes = ["environment.train_size=80", "environment.dev_size=16", "environment.test_size=16"]
words = sys.argv[1:]
if any(word.startswith("recipes/") for word in words) and words[0] != "config":
    words += sizes + (scenes if any("shapes" in word for word in words) else [])
if words[:2] == ["data", "vqa"]:
    words += ["--rows", "80"]
if words[:1] == ["view"]:
    words += ["--export", f"viewed-{{os.getpid()}}"]  # the server of the page ends by Ctrl-C
sys.argv[1:] = words
from fovea.cli.main import main

main()
"""


def blocks(heading: str) -> list[str]:
    """The blocks of commands below a heading and above the next one."""
    section = re.split(r"^##+ ", README.partition(f"# {heading}\n")[2], flags=re.MULTILINE)[0]
    return re.findall(r"^```\n(.*?)^```$", section, flags=re.DOTALL | re.MULTILINE)


def lines_of(block: str) -> list[str]:
    return [line for line in block.replace("\\\n", " ").splitlines() if line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone's root as far as the commands can tell."""
    root = tmp_path_factory.mktemp("clone")
    (root / "recipes").symlink_to(ROOT / "recipes")
    command = root / ".venv" / "bin" / "fovea"
    command.parent.mkdir(parents=True)
    command.write_text(FOVEA)
    command.chmod(0o755)
    return root


def paste(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        line, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=150
    )


def demo() -> str:
    planned = subprocess.run(
        ["make", "--dry-run", "demo"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    return planned.stdout.splitlines()[-1]


@pytest.mark.slow
def test_the_demo_ends_with_commands_that_work(folder: Path) -> None:
    done = paste(demo(), folder)
    _, _, commands = done.stdout.partition("next:\n")
    assert len(commands.splitlines()) == 3, done.stdout + done.stderr
    for line in commands.splitlines():
        assert paste(line, folder).returncode == 0, line


@pytest.mark.slow
@pytest.mark.parametrize("line", lines_of("".join(blocks("Use it"))), ids=lambda line: line.split("  #")[0])
def test_a_line_works_after_those_above_it(line: str, folder: Path) -> None:
    done = paste(line, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_the_commands_for_a_real_model_have_settings_that_there_are(folder: Path) -> None:
    (block,) = blocks("A real model on Geometry3K")
    (train,) = [line for line in lines_of(block) if " train " in line]
    done = paste(train.replace(" train ", " config "), folder)
    assert done.returncode == 0, done.stderr
