"""The state of a Megatron policy in a checkpoint, by Megatron-core's own distributed files.

They are read by as many processes as have written them, divided as those were.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel

from fovea.errors import TrainError, broken_checkpoint
from fovea.train.megatron.optimizer import MegatronOptimizer
from fovea.train.megatron.parallel import Place

STATE, COUNTS = "megatron", "policy.json"
"""Folder of the tensors, and the file of the counters beside it."""


class Checkpoints:
    """Writes and reads weights, moments and counters of one process's part of the policy."""

    def __init__(self, model: DistributedDataParallel, optimizer: MegatronOptimizer, place: Place) -> None:
        self._model = model
        self._optimizer = optimizer
        self._place = place

    def save(self, folder: Path, counts: Mapping[str, int]) -> None:
        """Write all tensors and counters into an existing folder, by all processes together."""
        target = folder / STATE
        self._place.everyone.run_on_first(target.mkdir)
        dist_checkpointing.save(self._state(is_loading=False), str(target))
        self._place.everyone.run_on_first(lambda: _write(folder / COUNTS, counts))

    def load(self, folder: Path, *, num_processes: int) -> dict[str, int]:
        """Restore all tensors in place and return the counters.

        TrainError where they belong to another model, or were written by another number of processes.
        """
        with _reading(folder):
            counts: dict[str, int] = json.loads((folder / COUNTS).read_text())
            saved_by = counts["num_processes"]
        if saved_by != num_processes:
            raise TrainError(
                f"{folder} was saved by {saved_by} training processes of train.backend=megatron, and these are "
                f"{num_processes}, whose parts of the optimizer are others; start as many as before"
            )
        with _reading(folder):
            state = dist_checkpointing.load(self._state(is_loading=True), str(folder / STATE))
            self._model.module.load_state_dict(state["model"])
            self._optimizer.inner.load_state_dict(state["optimizer"])
        return counts

    def _state(self, *, is_loading: bool) -> dict[str, Any]:
        model = self._model.module.sharded_state_dict()
        return {"model": model, "optimizer": self._optimizer.inner.sharded_state_dict(model, is_loading=is_loading)}


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise TrainError(f"{folder}: {broken_checkpoint(error)}") from error


def _write(file: Path, counts: Mapping[str, int]) -> None:
    file.write_text(json.dumps(dict(counts)))
