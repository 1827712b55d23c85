"""Each metric is defined once, its page is whole, and what runs write is on it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.metrics.names import METRICS, Metric, definition_of, metrics_page, undefined
from tests.wiring.small import run_of

ROOT = Path(__file__).parents[2]
STEP = {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 3}


def test_the_command_prints_the_page() -> None:
    command = [sys.executable, "-m", "fovea.metrics.names"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == metrics_page()


def test_every_row_of_the_page_has_four_cells() -> None:
    rows = [line for line in metrics_page().splitlines() if line.startswith("| `")]
    assert len(rows) == len(METRICS)
    assert {len(re.split(r"(?<!\\)\|", row)) for row in rows} == {6}


def test_each_metric_is_defined_once_and_in_full() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    for metric in METRICS:
        assert metric.meaning.endswith("."), metric.name
        assert metric.healthy.endswith("."), metric.name


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("reward/overlong", "reward/overlong"),
        ("reward/format", "reward/<part>"),
        ("accuracy/dev/how many", "accuracy/dev/<kind>"),
        ("seconds/step", "seconds/step"),
        ("memory/activations_gib", "memory/activations_gib"),
        ("memory/rollout_gib", "memory/<phase>_gib"),
        *((key, None) for key in ("rewards", "accuracy/dev/", "xreward", "seconds", "memory/rollout", "loss/total")),
    ],
)
def test_a_name_goes_before_its_family(key: str, name: str | None) -> None:
    found = definition_of(key)
    assert (found and found.name) == name
    assert undefined(["step", "reward", key]) == ([] if name else [key])


def test_a_dot_in_a_name_is_a_dot() -> None:
    assert Metric(name="a.b", unit="", meaning="", healthy="").pattern.fullmatch("axb") is None


@pytest.mark.parametrize(
    "settings",
    [
        {"evaluate": {"every_steps": 1, "dev_size": 4}, "log": {"progress": False, "peak_tflops": 0.1}},
        {
            "algorithm": {
                **{"kl": {"coef": 0.1}, "importance_sampling_fix": True, "entropy_coef": 0.01},
                **{"ppo_epochs": 2, "minibatches": 2},
            }
        },
    ],
    ids=["dev readings and mfu", "every term of the loss"],
)
def test_what_a_run_writes_is_defined(settings: dict[str, object], tmp_path: Path) -> None:
    train(run_of(tmp_path, **{"max_steps": 1, "rollout": STEP, "evaluate": {"image_controls": False}, **settings}))
    (row,) = read_metrics(tmp_path)
    assert len(row) > 30
    assert undefined(row) == []
