"""The rollout engines compared on the same model and requests: tokens per second, start-up, weight syncs and memory.

    python -m benchmarks.engines embedded=.venv/bin/python vllm=.venv-vllm/bin/python sglang=.venv-sglang/bin/python

Each engine is measured in a whole run of `fovea train` with the given Python, one after another, so the figures include
everything that a user waits for. The model has random weights and a medium size, so all completions reach the maximum
length. Start-up is the time until the first step begins, including the parity gate. Memory is the peak of all processes
of a run together, with shared pages counted once (PSS). The gap is the largest difference between engine and trainer in
a token's log-prob, from the parity gate. The other figures are medians over the steps after the first ones.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.table import Table

from benchmarks.plan_check import COMMON, MID, RECIPES, REWARD
from benchmarks.printing import as_table, show
from benchmarks.process import MALLOC
from fovea.metrics.log import read_metrics
from fovea.run.parity import PARITY_FILE

WARM_STEPS = 2
"""Number of first steps that are not counted: caches fill, and the first weight sync sends all weights."""
LOOK_SECONDS = 0.1
SIZES = (
    *("rollout.prompts_per_step=8", "rollout.samples_per_prompt=8", "rollout.max_new_tokens=64"),
    *("evaluate.test_size=1", "parity.prompts=4"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one engine, which are one row of the table."""

    startup_seconds: float
    step_tokens: float
    """Completion tokens per step, the same for all engines unless a completion ends early."""
    tokens_per_second: float
    """Completion tokens per second of the rollout only."""
    sync_seconds: float
    peak_gib: float
    largest_gap: float
    """Largest difference between engine and trainer in a token's log-prob, in nats."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    found = {name: measure(name, python, options.steps, options.settings) for name, python in options.engines}
    if options.json:
        options.json.write_text(json.dumps({name: asdict(row) for name, row in found.items()}, indent=2) + "\n")
    show(_table(found))


def measure(engine: str, python: str, steps: int, settings: Sequence[str] = ()) -> Figures:
    """Run an engine and measure it; RuntimeError with the end of the run's output if it fails."""
    with tempfile.TemporaryDirectory(prefix="fovea-engines-") as name:
        folder = Path(name)
        (folder / "reward.py").write_text(REWARD)
        words = [str(RECIPES / "shapes.yaml"), *COMMON, MID, *SIZES, *settings, f"max_steps={steps + WARM_STEPS}"]
        places = [f"run_dir={folder}/run", f"reward={folder}/reward.py:score", f"rollout.engine={engine}"]
        # do not resolve links: Python finds its environment by the path of the interpreter
        command = [os.path.abspath(python), "-m", "fovea", "train", *words, *places]
        return _figures(folder / "run", *_run(command, folder))


def _run(command: Sequence[str], folder: Path) -> tuple[int, float]:
    """Run to the end; returns the peak memory in bytes, and the seconds until the first step's metrics were written."""
    started, peak_bytes, first_row_seconds = time.monotonic(), 0, 0.0
    with (folder / "output").open("w") as output:
        environment = {**os.environ, **MALLOC, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            peak_bytes = max(peak_bytes, _held_bytes(process.pid))
            if not first_row_seconds and read_metrics(folder / "run"):
                first_row_seconds = time.monotonic() - started
            time.sleep(LOOK_SECONDS)
    if process.returncode:
        said = (folder / "output").read_text()[-2000:]
        raise RuntimeError(f"{' '.join(command)} ended with code {process.returncode}:\n{said}")
    return peak_bytes, first_row_seconds


def _figures(run: Path, peak_bytes: int, first_row_seconds: float) -> Figures:
    first, *counted = read_metrics(run)
    counted = counted[WARM_STEPS - 1 :]
    tokens = [row["tokens_per_second"] * row["seconds/step"] for row in counted]
    kinds = json.loads((run / PARITY_FILE).read_text())["prompts"]
    return Figures(
        startup_seconds=first_row_seconds - first["seconds/step"],
        step_tokens=median(tokens),
        tokens_per_second=median(n / row["seconds/rollout"] for n, row in zip(tokens, counted, strict=True)),
        sync_seconds=median(row["seconds/weight_sync"] for row in counted),
        peak_gib=peak_bytes / 2**30,
        largest_gap=max(kind["max_abs"] for kind in kinds),
    )


def _held_bytes(pid: int) -> int:
    """Memory (PSS) of a process and its descendants in bytes; 0 if it has ended meanwhile."""
    folder = Path(f"/proc/{pid}")
    try:
        sizes = (folder / "smaps_rollup").read_text()
        children = " ".join(file.read_text() for file in folder.glob("task/*/children")).split()
    except OSError:
        return 0
    pss = re.search(r"^Pss: +(\d+) kB", sizes, re.MULTILINE)
    return (int(pss[1]) * 1024 if pss else 0) + sum(_held_bytes(int(child)) for child in children)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__.split("\n")[0])
    parser.add_argument(
        "engines", nargs="+", type=_engine, metavar="ENGINE=PYTHON", help="an engine and the Python of its environment"
    )
    parser.add_argument("--steps", type=int, default=5, help="number of counted steps of each run")
    parser.add_argument("--settings", nargs="*", default=(), help="additional settings of all runs")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures to FILE")
    return parser.parse_args(arguments)


def _engine(text: str) -> tuple[str, str]:
    name, _, python = text.partition("=")
    if not Path(python).is_file():
        raise argparse.ArgumentTypeError(f"{text}: there is no file {python!r}; give ENGINE=PATH/TO/python")
    return name, python


def _table(found: Mapping[str, Figures]) -> Table:
    headers = ("engine", "start-up s", "tokens", "tokens/s", "sync s", "peak GiB", "log-prob gap")
    return as_table("rollout engines, the same model and requests", headers, map(_cells, found, found.values()))


def _cells(name: str, row: Figures) -> tuple[str, ...]:
    speed = (f"{row.startup_seconds:.1f}", f"{row.step_tokens:.0f}", f"{row.tokens_per_second:.0f}")
    return name, *speed, f"{row.sync_seconds:.3f}", f"{row.peak_gib:.2f}", f"{row.largest_gap:.1e}"


if __name__ == "__main__":
    main()
