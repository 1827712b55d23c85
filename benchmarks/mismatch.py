"""Effect of truncated importance sampling where the engine samples from other probabilities than the trainer's.

    python -m benchmarks.mismatch recipes/shapes.yaml --out runs/mismatch max_steps=600
    python -m benchmarks.mismatch recipes/shapes.yaml --out runs/coarse --bits 4 max_steps=600

Three runs of one recipe: exact, with an inexact engine and importance weights, and with that engine without them. The
engine decodes with int8 weights, or, by `--bits`, with the language model's matrices rounded to that many bits. The
settings refuse the last of the three, hence this program. `python -m benchmarks.curves --entropy` plots them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fovea.config.loading import load_config
from fovea.config.run import Config
from fovea.loop import train
from fovea.models.outgoing import OutgoingWeight
from fovea.rollout.embedded.engine import EmbeddedEngine
from fovea.train.base import PolicyWorker
from fovea.train.local import LocalPolicy
from fovea.utils.malloc import keep_freed_memory
from fovea.weights.push import WeightPusher
from fovea.weights.sinks import SharedTensors
from fovea.wiring.run import build

RUNS = ("exact", "corrected", "uncorrected")
INT8 = ["rollout.engine.decode_weights=int8"]
# activations of rounded weights cannot be reused by an update, and the parity gate would rightly stop the run
ROUNDED = ["rollout.engine.reuse_gib=0", "parity.prompts=0"]


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
            assert isinstance(run.policy, LocalPolicy)
            assert isinstance(run.engine, EmbeddedEngine)
            weights = partial(rounded_weights, run.policy.worker, options.bits)
            run = replace(run, weight_sync=WeightPusher(weights, [SharedTensors(run.engine)]))
        train(run)


def rounded_weights(policy: PolicyWorker, bits: int) -> Iterator[OutgoingWeight]:
    """Weights of the policy rounded to a few bits, only for the engine."""
    for weight in policy.outgoing():
        # the vision tower may be shared with the trainer and stays exact
        if ".visual." in weight.name:
            yield weight
        else:
            copy = rounded(weight.tensor(), bits).requires_grad_(weight.is_trained)
            yield OutgoingWeight(name=weight.name, parameter=copy)


@torch.no_grad()
def rounded(weight: Tensor, bits: int) -> Tensor:
    """Round each row of a matrix to 2^bits - 1 evenly spaced values around 0; vectors stay as they are."""
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
    # bypasses the check that refuses this setting, since the comparison is the point
    algorithm = config.algorithm.model_copy(update={"importance_sampling_fix": False})
    return config.model_copy(update={"algorithm": algorithm})


if __name__ == "__main__":
    main()
