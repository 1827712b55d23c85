"""`profile=true`: which steps it looks at, and what it writes on a real run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from fovea.metrics.log import read_metrics
from fovea.metrics.profile import phase_times, timed_steps, traced_step
from tests.runs import QUICK, fovea_here

SMALL = [*QUICK, "environment.test_size=8", "evaluate.test_size=2", "rollout.prompts_per_step=4"]


def train(run_dir: Path, *settings: str) -> str:
    return fovea_here("train", "recipes/shapes.yaml", f"run_dir={run_dir}", *SMALL, *settings).output


def phase_rows(text: str) -> dict[str, list[str]]:
    """Cells by the name of the phase, from the first table of phases.txt."""
    lines = text.split("Operators", maxsplit=1)[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    return {name: rest for name, *rest in cells}


@pytest.mark.parametrize(
    ("start_step", "max_steps", "traced", "timed"),
    [
        (0, 1000, 6, [3, 4, 5]),
        (100, 1000, 106, [103, 104, 105]),
        (0, 5, 4, [1, 2, 3]),
        (0, 3, 2, [1]),
        (0, 2, 1, []),
        (9, 10, 9, []),
    ],
)
def test_warm_steps_are_timed_and_one_after_them_traced(
    start_step: int, max_steps: int, traced: int, timed: list[int]
) -> None:
    assert traced_step(start_step, max_steps) == traced
    assert timed_steps(start_step, traced) == timed


def test_phases_are_means_and_sum_to_the_step() -> None:
    rows = [
        {"seconds/step": 4.0, "seconds/rollout": 1.0, "seconds/update": 2.5, "memory/rollout_gib": 3.0, "reward": 1.0},
        {"seconds/step": 6.0, "seconds/rollout": 2.0, "seconds/update": 3.5, "memory/rollout_gib": 5.0},
    ]
    times = phase_times(rows)
    assert [(time.name, time.seconds, time.gib) for time in times] == [
        ("update", 3.0, None),
        ("rollout", 1.5, 4.0),
        ("between", 0.5, None),
        ("step", 5.0, None),
    ]
    assert [time.share for time in times] == pytest.approx([0.6, 0.3, 0.1, 1.0])


def test_what_runs_beside_the_update_or_within_a_phase_is_not_counted_twice() -> None:
    """A step of 5 that waits 1 for its rollout, updates for 3 and syncs for 0.5, while a rollout of 4 goes on."""
    seconds = {"step": 5.0, "rollout": 4.0, "data": 0.2, "idle_update": 1.0, "idle_rollout": 0.3, "update": 3.0}
    seconds |= {"sync": 0.5, "weight_sync": 0.5}
    times = {time.name: time.seconds for time in phase_times([{f"seconds/{name}": x for name, x in seconds.items()}])}
    assert times == {name: x for name, x in seconds.items() if name != "weight_sync"} | {"between": 0.5}


def test_a_real_run_leaves_a_trace_and_a_table_and_a_step_more_its_own(tmp_path: Path) -> None:
    output = train(tmp_path, "max_steps=5", "profile=true")
    folder = tmp_path / "profile"
    assert f"profile: {folder / 'phases.txt'}, {folder / 'trace.json.gz'}" in output.splitlines()

    events = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    phases = ("data", "rollout", "samples", "logprobs", "advantages", "update", "sync")
    assert [name for name in names if name in (*phases, "step")] == ["step", *phases], "one step, in its order"
    assert any(event["name"].startswith("aten::") for event in events)

    text = (folder / "phases.txt").read_text()
    rows = phase_rows(text)
    assert set(rows) == {*phases, "between", "step"}
    ms = {name: float(cells[0].replace(",", "")) for name, cells in rows.items()}
    assert sum(ms.values()) - ms["step"] == pytest.approx(ms["step"], abs=0.05 * len(ms))
    seconds = [row["seconds/step"] for row in read_metrics(tmp_path)]
    assert ms["step"] == pytest.approx(1000 * sum(seconds[1:4]) / 3, abs=0.06), "steps 2 to 4, without the tracer"
    assert "aten::mm" in text
    assert "rollout (outside operators)" in text

    assert "profile:" not in train(tmp_path, "max_steps=5", "profile=true", "resume=auto"), "no step is left"
    assert "Phases, step 6 (tracer on)" in train(tmp_path, "max_steps=6", "profile=true", "resume=auto")
    assert "profile" not in train(tmp_path / "off", "max_steps=1")
    assert not (tmp_path / "off/profile").exists()
