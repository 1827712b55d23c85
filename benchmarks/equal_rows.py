"""How many rows of decoding repeat another one: completions of a prompt that have had the same tokens so far.

    python -m benchmarks.equal_rows recipes/shapes.yaml max_steps=60

Trains a recipe, and counts what the engine decodes in each step. A row is a token of a completion that is run through
the model: all but its last. An engine with a tree of prefixes would run equal beginnings of a group once.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from fovea.config.loading import load_config
from fovea.loop import take_step
from fovea.run.context import Run
from fovea.run.lifecycle import begin, closing, record
from fovea.types import Group
from fovea.utils.event_loop import wait_for
from fovea.wiring.run import build

QUIET = ("log.progress=false", "checkpoint.every_steps=0", "evaluate.every_steps=0", "evaluate.before_training=false")
PARTS = 3
"""Rows of the table: the steps in so many parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of decoding of some groups."""

    completions: int
    unequal: int
    """Completions that equal no earlier one of their group."""
    rows: int
    """Each completion by itself."""
    prefixes: int
    """Equal beginnings of a group once."""

    def __add__(self, other: Rows) -> Rows:
        mine, others = asdict(self), asdict(other)
        return Rows(**{name: mine[name] + others[name] for name in mine})


def rows_of(completions: Iterable[Sequence[int]]) -> Rows:
    """Rows of one group."""
    tokens = [tuple(each) for each in completions]
    # the first token is drawn from the prompt's pass, and the last one is never run
    run = [each[:end] for each in tokens for end in range(1, len(each))]
    return Rows(completions=len(tokens), unequal=len(set(tokens)), rows=len(run), prefixes=len(set(run)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.equal_rows", description=__doc__.split("\n")[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    with TemporaryDirectory(prefix="fovea-rows-") as folder:
        run = build(load_config([options.recipe], [*QUIET, f"run_dir={folder}/run", *options.overrides]))
        steps = wait_for(_steps(run))
    Console().print(_table(steps))


async def _steps(run: Run) -> list[Rows]:
    """Train, and count the rows of each step."""
    steps: list[Rows] = []
    async with closing(run):
        state = await begin(run)
        while state.step < run.config.max_steps and run.stream.has_more:
            with run.phases("step"):
                groups, metrics = await take_step(run, state)
            steps.append(reduce(add, map(_rows_of_group, groups)))
            state = await record(run, state, groups, metrics)
    return steps


def _rows_of_group(group: Group) -> Rows:
    tokens = [turn.tokens for episode in group.episodes for turn in episode.turns[:1]]
    return rows_of(each.completion.token_ids_T.tolist() for each in tokens if each is not None)


def _table(steps: Sequence[Rows]) -> Table:
    table = Table(title="Rows of decoding, and those that a tree of prefixes would leave")
    for header in ("steps", "completions", "unequal", "rows", "prefixes", "rows / prefixes"):
        table.add_column(header, justify="left" if header == "steps" else "right")
    size = -(-len(steps) // PARTS)
    for start in range(0, len(steps), size):
        part = steps[start : start + size]
        total = reduce(add, part)
        counts = (total.completions, total.unequal, total.rows, total.prefixes)
        ratio = f"{total.rows / total.prefixes:.2f}" if total.prefixes else ""
        table.add_row(f"{start + 1} to {start + len(part)}", *(f"{count:,}" for count in counts), ratio)
    return table


if __name__ == "__main__":
    main()
