"""Importance weights on and off, where the trainer has the engine's positions and where it has 1-D ones.

    python -m benchmarks.positions recipes/shapes.yaml --out runs/positions max_steps=300 evaluate.every_steps=50

Four runs of one recipe in bfloat16, whose engine and trainer round differently. The engine always has the M-RoPE
positions of the model. A trainer that numbers tokens one by one, those of an image too, computes another policy than
the one that answered; only importance weights could tell it so. The warm-up has the right positions in all four, as a
published model has had. `python -m benchmarks.curves --entropy` plots them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from fovea.config.loading import load_config
from fovea.loop import train
from fovea.models.families.base import ModelFamily
from fovea.train import microbatches
from fovea.train.packing import MicroBatch, micro_batches
from fovea.types import PromptImage
from fovea.utils.malloc import keep_freed_memory
from fovea.wiring.run import build

RUNS = ("mrope", "mrope-weights", "1d", "1d-weights")
# the trainer computes its own log-probs, and the parity gate would rightly stop a run whose positions differ
SETTINGS = ["model.dtype=bfloat16", "rollout.engine.reuse_gib=0", "parity.prompts=0"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.positions", description=__doc__.split("\n")[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, required=True, help="folder for the four run folders")
    parser.add_argument("--only", choices=RUNS, help="one of the four")
    options = parser.parse_intermixed_args(arguments)
    keep_freed_memory()
    for name in [options.only] if options.only else RUNS:
        weights = f"algorithm.importance_sampling_fix={'true' if name.endswith('-weights') else 'false'}"
        config = load_config([options.recipe], [*SETTINGS, weights, *options.overrides])
        run = build(config.model_copy(update={"run_dir": str(options.out / name)}))
        with consecutive_positions() if name.startswith("1d") else nullcontext():
            train(run)


@contextmanager
def consecutive_positions() -> Iterator[None]:
    """Within it, the updates of RL number the tokens one by one; warm-up and engine keep the model's positions."""

    def packed(family: ModelFamily, *rest: Any) -> list[MicroBatch]:
        return micro_batches(cast("ModelFamily", ConsecutivePositions(family)), *rest)

    with patch.object(microbatches, "micro_batches", packed):
        yield


class ConsecutivePositions:
    """A model family in all but the positions of images, whose tokens are numbered as those of a text."""

    def __init__(self, family: ModelFamily) -> None:
        self._family = family

    def __getattr__(self, name: str) -> Any:
        return getattr(self._family, name)

    def positions(
        self, token_ids_L: NDArray[np.int64], _images: Sequence[PromptImage], start: int
    ) -> tuple[NDArray[np.int64], int]:
        return self._family.positions(token_ids_L, (), start)


if __name__ == "__main__":
    main()
