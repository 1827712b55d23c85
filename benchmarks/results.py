"""Test accuracies and rewards of finished runs as Markdown tables: before RL, after RL, and without the image.

    python -m benchmarks.results GRPO=runs/g0,runs/g1,runs/g2 PPO=runs/p0,runs/p1,runs/p2
    python -m benchmarks.results GRPO=runs/g0,runs/g1 --kinds unseen  # adds a column per kind over seeds
    python -m benchmarks.results --parts GRPO=runs/g0     # parts of the reward instead of question types

The first table has a line per run. Accuracies after RL are followed by their 95 % interval over rows; `-` marks an
evaluation that the run did not do. The second table has a line per name with several seeds: means over the seeds, and
changes with Student's 95 % interval. Its rewards are means of sampled answers in the first and the last twenty steps;
for a random reward (`benchmarks/controls.py`), they are the rewards that the environment would have given.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from fovea.metrics.log import read_metrics
from fovea.report.about import SUMMARY_FILE
from fovea.report.summary import SummaryJson, read_summary
from fovea_gym.benchmarks.estimates import Estimate

STEPS_READ = 20
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % quantiles of Student's t distribution for 1 to 9 degrees of freedom."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER,FOLDER", help="run folders of one name")
    parser.add_argument("--parts", action="store_true", help="show parts of the reward, not question types")
    parser.add_argument(
        "--kinds", nargs="+", default=[], metavar="WORD", help="columns for types whose names contain WORD"
    )
    parser.add_argument(
        "--medians", nargs="+", default=[], metavar="PART", help="columns with medians of a part of the reward"
    )
    options = parser.parse_args(arguments)
    named = [(name, folders.split(",")) for name, _, folders in (word.partition("=") for word in options.runs)]
    folders = [(name, Path(folder)) for name, of_name in named for folder in of_name]
    runs = [(name, folder, read_summary(folder / SUMMARY_FILE)) for name, folder in folders]
    print("\n".join(table([(name, summary) for name, _, summary in runs], parts=options.parts)))
    if lines := list(seed_table(runs, options.kinds, options.medians)):
        print("\n".join(["", *lines]))


def seed_table(
    runs: Sequence[tuple[str, Path, SummaryJson]], kinds: Sequence[str] = (), medians: Sequence[str] = ()
) -> Iterator[str]:
    """Lines of a Markdown table over the seeds of each name and number of steps; none if no name has several seeds.

    Each word of `kinds` adds the accuracy on the question types whose names contain it. Each of `medians` adds the
    median of a part of the reward over test rows.
    """
    groups = groupby(runs, key=lambda run: (run[0], run[2]["steps"]))
    named = [(name, steps, [run[1:] for run in found]) for (name, steps), found in groups]
    several = [each for each in named if len(each[2]) > 1]
    if not several:
        return
    headers = ["run", "seeds", "steps", "reward, first 20", "last 20", "change", "before RL", "after", "change"]
    headers += [word for kind in kinds for word in (f"{kind} before", kind)]
    headers += [word for part in medians for word in (f"median {part} before", "after")] + ["shuffled", "blank"]
    yield _line(headers)
    yield _line(["---"] * len(headers))
    for name, steps, found in several:
        folders = [folder for folder, _ in found]
        rewards = [_sampled(folder) for folder in folders]
        summaries = [summary for _, summary in found]
        accuracies = [(_start(summary), summary["accuracy"]["final"]) for summary in summaries]
        without = [[summary[key] for summary in summaries] for key in ("shuffled_images", "blank_images")]
        yield _line(
            [
                name,
                str(len(found)),
                str(steps),
                *_before_and_after(rewards),
                *_before_and_after(accuracies),
                *(_number(_mean(values)) for kind in kinds for values in _of_kind(kind, summaries)),
                *(f"{statistics.fmean(values):.0f}" for part in medians for values in _medians(part, folders)),
                *(_number(_mean(values)) for values in without),
            ]
        )


def _of_kind(kind: str, summaries: Sequence[SummaryJson]) -> Iterator[list[float | None]]:
    """Accuracies before and after RL over all question types whose names contain the word `kind`."""
    tests = [summary["test"] for summary in summaries]
    starts = [test["warmup"] or test["before"] for test in tests]
    yield [None if start is None else _accuracy_of(kind, start.by_type) for start in starts]
    yield [_accuracy_of(kind, test["final"].by_type) for test in tests]


def _accuracy_of(kind: str, by_type: Mapping[str, Estimate]) -> float | None:
    found = [value for key, value in by_type.items() if kind in key]
    return sum(each.mean * each.n for each in found) / sum(each.n for each in found) if found else None


def _medians(part: str, folders: Sequence[Path]) -> Iterator[list[float]]:
    """Medians of a part of the reward over test rows, before and after RL; an answer without it counts as infinite."""
    for names in (("after-warmup", "before"), ("final",)):
        files = [
            next(file for name in names if (file := folder / f"answers/test-{name}.jsonl").exists())
            for folder in folders
        ]
        rows = [[json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in files]
        yield [statistics.median(row["answers"][0]["parts"].get(part, math.inf) for row in own) for own in rows]


def _sampled(folder: Path) -> tuple[float, float] | tuple[None, None]:
    """Mean reward of the sampled answers in the first and the last STEPS_READ steps; None for a shorter run."""
    rewards = [row.get("reward/true", row["reward"]) for row in read_metrics(folder)]
    if len(rewards) < STEPS_READ:
        return None, None
    return statistics.fmean(rewards[:STEPS_READ]), statistics.fmean(rewards[-STEPS_READ:])


def _before_and_after(pairs: Sequence[tuple[float | None, float | None]]) -> tuple[str, str, str]:
    """The mean before, the mean after, and the mean change with its interval, as text."""
    changes = [after - before for before, after in pairs if before is not None and after is not None]
    return (
        _number(_mean([pair[0] for pair in pairs])),
        _number(_mean([pair[1] for pair in pairs])),
        _over_seeds(changes),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def _over_seeds(values: Sequence[float]) -> str:
    if len(values) < 2:
        return "-"
    mean = statistics.fmean(values)
    half = T_975[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{_number(mean)} [{_number(mean - half)}, {_number(mean + half)}]"


def table(runs: Sequence[tuple[str, SummaryJson]], *, parts: bool = False) -> Iterator[str]:
    """Lines of a Markdown table with a row per run and a column per question type, or per part of the reward."""
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
                str(summary["test"]["final"].accuracy.n),
            ]
        )


def _means(summary: SummaryJson, *, parts: bool) -> dict[str, float]:
    final = summary["test"]["final"]
    return {key: value.mean for key, value in (final.parts if parts else final.by_type).items()}


def _start(summary: SummaryJson) -> float | None:
    """The accuracy at the start of RL: after the warm-up, if there was one."""
    accuracy = summary["accuracy"]
    return accuracy["before"] if accuracy["warmup"] is None else accuracy["warmup"]


def _with_interval(summary: SummaryJson) -> str:
    accuracy = summary["test"]["final"].accuracy
    return f"{_number(accuracy.mean)} [{_number(accuracy.low)}, {_number(accuracy.high)}]"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
