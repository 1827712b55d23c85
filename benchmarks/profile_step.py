"""Where one step of a recipe spends its time: phases, and the operators under them.

    python -m benchmarks.profile_step recipes/shapes.yaml [key=value ...]

Runs ten steps to get going, then times twenty and profiles one. Prints tables; asserts nothing.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from fovea.build import build
from fovea.config_io import load_config
from fovea.loop import take_step
from fovea.rollout.wait import wait_for
from fovea.run import Run
from fovea.stages import begin

FIRST, TIMED = 10, 20


def main(recipe: str, *overrides: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"run_dir={folder}/run", "log.progress=false", "evaluate.test_size=8", "warmup.max_steps=200"]
        run = build(load_config([Path(recipe)], [*settings, *overrides]))
        with run.metrics, run.progress:
            begin(run)
            _steps(run, 0, FIRST)
            _print_phases(_steps(run, FIRST, TIMED))
            with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
                _steps(run, FIRST + TIMED, 1)
        print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=15, max_name_column_width=48))


def _steps(run: Run, first: int, count: int) -> list[dict[str, float]]:
    seconds = []
    for step in range(first, first + count):
        with run.phases("step"):
            wait_for(take_step(run, step))
        seconds.append(run.phases.seconds())
    return seconds


def _print_phases(rows: list[dict[str, float]]) -> None:
    totals: dict[str, float] = defaultdict(float)
    for row in rows:
        for name, seconds in row.items():
            totals[name.removeprefix("seconds/")] += seconds
    whole = totals.pop("step")
    totals["other"] = whole - sum(totals.values())
    print(f"{'phase':10} {'ms a step':>10} {'share':>7}")
    for name, seconds in sorted(totals.items(), key=lambda item: -item[1]):
        print(f"{name:10} {1000 * seconds / len(rows):10.1f} {seconds / whole:7.1%}")
    print(f"{'step':10} {1000 * whole / len(rows):10.1f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
