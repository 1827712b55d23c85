"""A script of the Python API, with the run folder as its argument."""

from __future__ import annotations

import os
import sys

import fovea
from tests.api.small import PHOTOS, SETTINGS, rows, score

if __name__ == "__main__":
    settings = {**SETTINGS, "run_dir": sys.argv[1], "data.cache_dir": f"{sys.argv[1]}-cache"}
    trainer = fovea.GRPO(
        rows=rows(),
        reward=score,
        environment=PHOTOS,
        settings=settings,
        on_step=lambda record: print("callback, rank", os.environ["RANK"], "step", record.step),
    )
    run = trainer.train()
    print("after train, rank", os.environ["RANK"], "steps", len(run.metrics))
    trainer.evaluate("gold", quiet=True)
