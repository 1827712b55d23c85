"""The commands of the README, in its order and in one folder, as a newcomer pastes them; only sizes are smaller."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.warm import run_warm

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMAND = ".venv/bin/fovea"


def blocks(heading: str) -> list[str]:
    section = re.split(r"^##+ ", README.partition(f"# {heading}\n")[2], flags=re.MULTILINE)[0]
    return re.findall(r"^```\n(.*?)^```$", section, flags=re.DOTALL | re.MULTILINE)


def lines_of(block: str) -> list[str]:
    return [line for line in block.replace("\\\n", " ").splitlines() if line]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    return tmp_path


def paste(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command, *words = shlex.split(line, comments=True)
    if command == COMMAND:
        return run_warm(["tests.readme_command", *words], environment, timeout=300, cwd=folder)
    return subprocess.run(
        line, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def demo() -> str:
    # without its messages about folders where the tests themselves run under make
    words = ["make", "--dry-run", "--no-print-directory", "demo"]
    planned = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    return planned.stdout.splitlines()[-1]


@pytest.mark.slow
def test_the_demo_ends_with_commands_that_work(folder: Path) -> None:
    done = paste(demo(), folder)
    _, _, commands = done.stdout.partition("next:\n")
    assert len(commands.splitlines()) == 3, done.stdout + done.stderr
    for line in commands.splitlines():
        assert paste(line, folder).returncode == 0, line


@pytest.mark.slow
def test_every_line_works_after_those_above_it(folder: Path) -> None:
    done = [paste(line, folder) for line in lines_of("".join(blocks("Use it")))]
    assert len(done) > 15
    failed = [each for each in done if each.returncode or "Traceback" in each.stderr]
    assert failed == []


@pytest.mark.parametrize("page", ["README.md", "docs/python.md", "notebooks/own_reward.ipynb"])
def test_the_first_reward_that_a_page_shows_is_exact(page: str) -> None:
    """A model learns to write all answers in a row where the right one among them is enough."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "text.strip() == task.answer" in text
    assert not re.search(r"float\(task\.answer in text|images: task\.answer in text", text)


def test_the_commands_for_a_real_model_have_settings_that_there_are(folder: Path) -> None:
    (block,) = blocks("A real model on Geometry3K")
    (train,) = [line for line in lines_of(block) if " train " in line]
    done = paste(train.replace(" train ", " config "), folder)
    assert done.returncode == 0, done.stderr
