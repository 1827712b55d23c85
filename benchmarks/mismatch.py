"""Does truncated importance sampling help where the engine draws from other probabilities than the trainer's?

    python -m benchmarks.mismatch recipes/shapes.yaml --out runs/mismatch max_steps=600
    python -m benchmarks.mismatch recipes/shapes.yaml --out runs/coarse --bits 4 max_steps=600

Three runs of one recipe: exact, with an inexact engine and importance weights, with that engine and without them. The
engine decodes with int8 weights, or, by `--bits`, with the language model's matrices rounded to so few bits. The last
of the three is refused by the settings, which is why this needs a program. `python -m benchmarks.curves --entropy`
draws them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fovea.build.run import build
from fovea.config.loading import load_config
from fovea.config.run import Config
from fovea.loop import train
from fovea.rollout.base import Engine
from fovea.types import Completion, Prompt, Sampling, Weights
from fovea.utils.malloc import keep_freed_memory

RUNS = ("exact", "corrected", "uncorrected")
INT8 = ["rollout.decode_weights=int8"]
# what was drawn from rounded weights can serve no update, and the gate at the start would rightly stop the run
ROUNDED = ["rollout.reuse_gib=0", "parity.prompts=0"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mismatch", description=__doc__.split("\n")[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, required=True, help="folder for the three run folders")
    parser.add_argument("--only", choices=RUNS, help="one of the three")
    parser.add_argument(
        "--bits", type=int, choices=range(2, 9), help="round the engine's matrices; default: int8 decoding"
    )
    options = parser.parse_intermixed_args(arguments)
    keep_freed_memory()
    for name in [options.only] if options.only else RUNS:
        config = _config(name, options.recipe, options.overrides, options.bits)
        run = build(config.model_copy(update={"run_dir": str(options.out / name)}))
        if name != "exact" and options.bits:
            run = replace(run, engine=RoundedEngine(run.engine, options.bits))
        train(run)


@dataclass(frozen=True, slots=True)
class RoundedEngine:
    """Draws from weights with a few bits each, and says what they said."""

    engine: Engine
    bits: int

    async def generate(self, prompt: Prompt, sampling: Sampling, n: int) -> Sequence[Completion]:
        return await self.engine.generate(prompt, sampling, n)

    def load_weights(self, weights: Weights, version: int) -> None:
        # the vision tower may be the trainer's own and stays exact
        self.engine.load_weights(
            [(name, x if ".visual." in name else rounded(x, self.bits)) for name, x in weights], version
        )

    def sleep(self) -> None:
        self.engine.sleep()

    def wake(self) -> None:
        self.engine.wake()

    def close(self) -> None:
        self.engine.close()


@torch.no_grad()
def rounded(weight: Tensor, bits: int) -> Tensor:
    """Each row of a matrix to 2^bits - 1 evenly spaced values about 0; vectors as they are."""
    if weight.ndim < 2:
        return weight
    steps = 2 ** (bits - 1) - 1
    rows = weight.reshape(len(weight), -1)
    step = rows.abs().amax(1, keepdim=True).clamp(min=1e-12) / steps
    values: Tensor = (rows / step).round() * step
    return values.reshape(weight.shape)


def _config(name: str, recipe: Path, overrides: Sequence[str], bits: int | None) -> Config:
    inexact = [*(ROUNDED if bits else INT8), "algorithm.importance_sampling_fix=true"]
    config = load_config([recipe], [*overrides, *([] if name == "exact" else inexact)])
    if name != "uncorrected":
        return config
    # past the check that refuses it: the comparison is the point
    algorithm = config.algorithm.model_copy(update={"importance_sampling_fix": False})
    return config.model_copy(update={"algorithm": algorithm})


if __name__ == "__main__":
    main()
