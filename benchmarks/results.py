"""Test accuracies of finished runs as a Markdown table: before and after RL, by question type, without the image.

    python -m benchmarks.results GRPO=runs/g0,runs/g1 PPO=runs/p0
    python -m benchmarks.results --parts GRPO=runs/g0     # named parts of the reward in place of question types

One line per run. Accuracies after RL have their 95 % interval over rows behind them; `-` stands where a run took no
such reading. A second table has a line per name with several seeds: means with Student's 95 % interval over seeds.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from fovea.report.about import SUMMARY_FILE
from fovea.report.summary import SummaryJson, read_summary

T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % points of Student's t distribution for 1 to 9 degrees of freedom."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER,FOLDER", help="run folders of one name")
    parser.add_argument("--parts", action="store_true", help="parts of the reward in place of question types")
    options = parser.parse_args(arguments)
    named = [(name, folders.split(",")) for name, _, folders in (word.partition("=") for word in options.runs)]
    runs = [(name, read_summary(Path(folder) / SUMMARY_FILE)) for name, folders in named for folder in folders]
    print("\n".join(table(runs, parts=options.parts)))
    if lines := list(seed_table(runs)):
        print("\n".join(["", *lines]))


def seed_table(runs: Sequence[tuple[str, SummaryJson]]) -> Iterator[str]:
    """Lines of a Markdown table over the seeds of each name and number of steps; none where all are single runs."""
    groups = groupby(runs, key=lambda run: (run[0], run[1]["steps"]))
    named = [(name, [summary for _, summary in found]) for (name, _), found in groups]
    several = [(name, found) for name, found in named if len(found) > 1]
    if not several:
        return
    headers = ["run", "seeds", "after", "change"]
    yield _line(headers)
    yield _line(["---"] * len(headers))
    for name, found in several:
        starts = [(_start(summary), summary["accuracy"]["final"]) for summary in found]
        changes = [after - before for before, after in starts if before is not None]
        yield _line([name, str(len(found)), _over_seeds([after for _, after in starts]), _over_seeds(changes)])


def _over_seeds(values: Sequence[float]) -> str:
    if len(values) < 2:
        return "-"
    mean = statistics.fmean(values)
    half = T_975[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{_number(mean)} [{_number(mean - half)}, {_number(mean + half)}]"


def table(runs: Sequence[tuple[str, SummaryJson]], *, parts: bool = False) -> Iterator[str]:
    """Lines of a Markdown table of named runs; its columns are the question types, or parts, of all of them."""
    columns = list(dict.fromkeys(key for _, summary in runs for key in _means(summary, parts=parts)))
    headers = ["run", "seed", "steps", "before RL", "after", *columns, "shuffled", "blank", "rows"]
    yield _line(headers)
    yield _line(["---"] * len(headers))
    for name, summary in runs:
        means = _means(summary, parts=parts)
        yield _line(
            [
                name,
                str(summary["seed"]),
                str(summary["steps"]),
                _number(_start(summary)),
                _with_interval(summary),
                *(_number(means.get(column)) for column in columns),
                _number(summary["shuffled_images"]),
                _number(summary["blank_images"]),
                str(summary["test"]["final"]["accuracy"]["n"]),
            ]
        )


def _means(summary: SummaryJson, *, parts: bool) -> dict[str, float]:
    final = summary["test"]["final"]
    return {key: value["mean"] for key, value in (final["parts"] if parts else final["by_type"]).items()}


def _start(summary: SummaryJson) -> float | None:
    """Accuracy from which RL began: after the warm-up, where there was one."""
    accuracy = summary["accuracy"]
    return accuracy["before"] if accuracy["warmup"] is None else accuracy["warmup"]


def _with_interval(summary: SummaryJson) -> str:
    accuracy = summary["test"]["final"]["accuracy"]
    return f"{_number(accuracy['mean'])} [{_number(accuracy['low'])}, {_number(accuracy['high'])}]"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
