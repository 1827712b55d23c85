"""The public API as type checkers see it; docs/python.md: its code runs, and it has every argument of TRL's trainer."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fovea

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
TRL = Path(*importlib.util.find_spec("trl").submodule_search_locations)  # type: ignore[union-attr,misc]
"""Its source, since importing TRL takes seconds."""


@pytest.mark.slow
def test_the_page_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    names: dict[str, Any] = {}
    assert len(BLOCKS) == 5
    for code in BLOCKS:
        smaller = re.sub(r"max_steps(=|\": )(40|15)", r"max_steps\g<1>2", code)
        smaller = smaller.replace('"check_every_steps": 5', '"check_every_steps": 2')
        exec(compile(smaller, "python.md", "exec"), names)
    first = fovea.load_run("runs/colours")
    assert len(first.metrics) == 2
    assert Path("exported/colours/model.safetensors").is_file()
    assert Path("eval.html").is_file()
    rewards = [row["reward"] for row in fovea.load_run("runs/followed").metrics]
    assert names["curve"] == list(enumerate(rewards, start=1))


def test_every_argument_of_trls_trainer_has_a_counterpart() -> None:
    tree = ast.parse((TRL / "trainer" / "grpo_trainer.py").read_text(encoding="utf-8"))
    (trainer,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "GRPOTrainer"]
    (init,) = [node for node in trainer.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    arguments = {each.arg for each in (*init.args.args, *init.args.kwonlyargs)} - {"self"}
    assert len(arguments) > 10
    section = PAGE.partition("## From TRL")[2]
    first_cells = re.findall(r"^\| (.*?) \|", section, re.MULTILINE)
    named = {name for cell in first_cells for name in re.findall(r"`(\w+)", cell)}
    assert arguments <= named
    # nor has TRL a PPO whose arguments the table would lack
    assert "TRL 1.16 has no PPO" in PAGE
    with_ppo = [file for file in TRL.rglob("*.py") if "class PPO" in file.read_text(encoding="utf-8")]
    assert with_ppo == [], "its fields belong into tools/fovea_tools/importer/elsewhere.yaml, as those of GRPOConfig"


def test_the_page_names_all_that_is_public() -> None:
    section = PAGE.partition("## The names")[2].partition("\n## ")[0]
    for name in set(fovea.__all__) - {"__version__", "Exported"}:
        assert name in section


USER = """
from collections.abc import Sequence

import fovea
from PIL.Image import Image


def reward(task: fovea.Task, text: str, images: Sequence[Image]) -> dict[str, float]:
    return {"right": float(task.answer in text)}


trainer = fovea.GRPO(model="folder", rows=[{"image": b"", "question": "?"}], reward=reward, max_steps=3, warmup=None)
run: fovea.TrainedRun = trainer.train()
steps: int = len(run.metrics)
accuracy: float = trainer.evaluate("majority")[0].accuracy.mean
difference: float = fovea.export(run, "out").max_logprob_difference
fovea.PPO(model={"tiny": {}}, algorithm={"ppo_epochs": 2})
"""
WRONG = """
import fovea

fovea.GRPO(modle="folder")
fovea.GRPO(model="folder", max_steps="three")
fovea.GRPO(model="folder").train().metricks
fovea.trian
"""


@pytest.mark.slow
def test_a_type_checker_knows_the_api(tmp_path: Path) -> None:
    for name, code in (("user", USER), ("wrong", WRONG)):
        (tmp_path / f"{name}.py").write_text(code)
    # by the settings and the cache of `make lint`: without it, all of torch is read again
    files = [str(tmp_path / f"{name}.py") for name in ("user", "wrong")]
    command = [sys.executable, "-m", "mypy", "--no-error-summary", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    errors = [Path(line.partition(": error: ")[0]).name for line in lines if ": error: " in line]
    assert errors == [f"wrong.py:{line}" for line in (4, 5, 6, 7)], done.stdout + done.stderr
