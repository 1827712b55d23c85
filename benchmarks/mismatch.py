"""Does truncated importance sampling help where the engine draws from other probabilities than the trainer's?

    python -m benchmarks.mismatch recipes/shapes.yaml --out runs/mismatch max_steps=600

Three runs of one recipe: exact, int8 decoding with importance weights, int8 decoding without. The last is refused by
the settings, which is why it needs a program. `python -m benchmarks.curves --entropy` draws them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fovea.allocator import keep_freed_memory
from fovea.build import build
from fovea.config import Config
from fovea.config_io import load_config
from fovea.loop import train

INT8 = ["rollout.decode_weights=int8", "algorithm.importance_sampling_fix=true"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mismatch", description=__doc__.split("\n")[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, required=True, help="folder for the three run folders")
    parser.add_argument("--only", choices=("exact", "corrected", "uncorrected"), help="one of the three")
    options = parser.parse_intermixed_args(arguments)
    keep_freed_memory()
    for name in [options.only] if options.only else ["exact", "corrected", "uncorrected"]:
        train(build(_config(name, options.recipe, [*options.overrides, f"run_dir={options.out / name}"])))


def _config(name: str, recipe: Path, overrides: Sequence[str]) -> Config:
    config = load_config([recipe], [*overrides, *([] if name == "exact" else INT8)])
    if name != "uncorrected":
        return config
    # past the check that refuses it: the comparison is the point
    algorithm = config.algorithm.model_copy(update={"importance_sampling_fix": False})
    return config.model_copy(update={"algorithm": algorithm})


if __name__ == "__main__":
    main()
