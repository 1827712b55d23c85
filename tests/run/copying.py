"""A short run whose engine holds a copy of the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from fovea.rollout.embedded.engine import EmbeddedEngine
from fovea.run.context import Run
from fovea.train.local import LocalPolicy
from fovea.types import Shape
from fovea.weights.push import WeightPusher
from tests.wiring.small import run_of

SETTINGS: dict[str, object] = {
    "max_steps": 3,
    "rollout": {"prompts_per_step": 2, "samples_per_prompt": 4, "max_new_tokens": 12, "engine": {"reuse_gib": 0}},
    # with a bonus for entropy every group trains
    "algorithm": {"entropy_coef": 0.01, "max_groups_without_signal": 2},
    "train": {"learning_rate": 3e-3},
    "evaluate": {"image_controls": False, "test_size": 2, "dev_size": 2},
}


@dataclass
class Copying:
    """A sink that copies all weights, and says so of pushes that it loses too."""

    engine: EmbeddedEngine
    lost_from: int
    has_weights = False

    def begin_push(self, shapes: Mapping[str, Shape]) -> None:
        self.copies: dict[str, Tensor] = {}

    def take_weights(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        self.copies |= {name: weight.clone() for name, weight in bucket}

    def finish_push(self, version: int) -> None:
        if version < self.lost_from:
            self.engine.load_weights(self.copies, version)


def copying_run(folder: Path, *, lost_from: int = 99, **settings: object) -> Run:
    run = run_of(folder, **SETTINGS | settings)
    assert isinstance(run.engine, EmbeddedEngine)
    assert isinstance(run.policy, LocalPolicy)
    sink = Copying(run.engine, lost_from)
    return replace(run, weight_sync=WeightPusher(run.policy.worker.outgoing, [sink]))
