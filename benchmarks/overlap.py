"""Time of a step with rollouts and updates one after the other and overlapped, with a process for each.

    python -m benchmarks.overlap --steps 60 --json overlap.json recipes/shapes.yaml seed=1

Each of `--bounds` (`rollout.max_staleness_steps`) is a separate run under torchrun, with one thread per process. The
runs follow one another. Figures are medians in seconds over the steps after the first ones, without checkpoints and
evaluations.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from rich.table import Table

from benchmarks.printing import as_table, show
from benchmarks.process import MALLOC
from fovea.metrics.log import read_metrics

WARM_STEPS = 5
"""Number of first steps that are not counted: caches fill, and no rollout is ahead of the first step."""
APART = ("cluster.placement=disaggregated", "cluster.rollout_gpus=1")
WITHOUT_BARRIERS = (
    *("checkpoint.every_steps=0", "evaluate.every_steps=0", "evaluate.before_training=false"),
    *("evaluate.image_controls=false", "evaluate.test_size=8", "log.tensorboard=false", "log.progress=false"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    results = {bound: figures(_steps_of_run(bound, options.steps, options.words)) for bound in options.bounds}
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    show(_table(results))


def figures(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Medians of the seconds of a step, of its parts, and of the time that each side waits for the other."""
    return {
        "step": median(row["seconds/step"] for row in rows),
        "rollout": median(row["seconds/rollout"] for row in rows),
        "update": median(row["seconds/update"] for row in rows),
        "weight_sync": median(row.get("seconds/weight_sync", 0.0) for row in rows),
        "policy idle": median(row.get("seconds/idle_update", row["seconds/rollout"]) for row in rows),
        "engine idle": median(row.get("seconds/idle_rollout", _not_drawing(row)) for row in rows),
        "staleness": median(row.get("staleness/mean", 0.0) for row in rows),
    }


def _not_drawing(row: Mapping[str, float]) -> float:
    """The time of a step without overlap in which the engine neither samples nor receives weights."""
    return row["seconds/step"] - row["seconds/rollout"] - row["seconds/weight_sync"]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*", default=["recipes/shapes.yaml"], help="recipe and settings of the runs")
    parser.add_argument("--bounds", type=lambda text: [int(each) for each in text.split(",")], default=[0, 1])
    parser.add_argument("--steps", type=int, default=60, help="counted steps of each run")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures to FILE")
    return parser.parse_args(arguments)


def _steps_of_run(bound: int, steps: int, words: Sequence[str]) -> list[dict[str, float]]:
    """Run on two processes; returns the metrics of the counted steps."""
    with tempfile.TemporaryDirectory(prefix="fovea-overlap-") as folder:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "fovea", "train"]
        given = [*words, *APART, *WITHOUT_BARRIERS, f"max_steps={steps + WARM_STEPS}", f"run_dir={folder}/run"]
        subprocess.run(
            [*torchrun, *given, f"rollout.max_staleness_steps={bound}"],
            env={**os.environ, **MALLOC, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return read_metrics(Path(folder) / "run")[WARM_STEPS:]


def _table(results: Mapping[int, Mapping[str, float]]) -> Table:
    rows = ([str(bound), *(f"{value:.3f}" for value in found.values())] for bound, found in results.items())
    return as_table("median seconds of a step", ["bound", *next(iter(results.values()))], rows)


if __name__ == "__main__":
    main()
