"""State of a Megatron policy in a checkpoint, in the distributed format of Megatron-core.

Any number of processes can read it, with any division of the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException

from fovea.errors import TrainError, broken_checkpoint
from fovea.train.megatron.critic import ReplicatedValueHead
from fovea.train.megatron.optimizer import MegatronOptimizer
from fovea.train.megatron.parallel import ParallelRank

STATE, COUNTS = "megatron", "policy.json"
"""Folder of the tensors, and the file of the counters next to it."""

VALUE = "value"
"""Key of the value head and its moments."""
HAS_REFERENCE = "has_reference"

# Megatron would start a process for the queue that returns the result of writing, and it would outlive a kill of this
# process; a synchronous save does not need it (megatron-core 0.16.1)
filesystem_async._results_queue = SimpleQueue()


class MegatronCheckpoints:
    """Writes and reads weights, moments and counters of one process's part of the policy."""

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: MegatronOptimizer,
        value_head: ReplicatedValueHead | None,
        place: ParallelRank,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._value_head = value_head
        self._place = place

    def save(self, folder: Path, counts: Mapping[str, int], reference: Any | None = None) -> None:
        """Write all tensors and counters into an existing folder, by all processes together.

        `reference` is the model of the KL term if it is not the one that was loaded.
        """
        target = folder / STATE
        self._place.everyone.run_on_first(target.mkdir)
        with self._optimizer.on_device():
            state = self._state(reference, is_loading=False)
            if self._value_head is not None:
                state[VALUE] = self._value_head.state()
            dist_checkpointing.save(state, str(target))
        written = {**counts, HAS_REFERENCE: int(reference is not None)}
        self._place.everyone.run_on_first(lambda: _write(folder / COUNTS, written))

    def load(self, folder: Path, reference: Any | None = None) -> dict[str, int]:
        """Restore all tensors in place and return the counters; TrainError if they belong to another model.

        `reference` stays unchanged if none was saved.
        """
        with _reading(folder), self._optimizer.on_device():
            counts: dict[str, int] = json.loads((folder / COUNTS).read_text())
            saved = reference if counts[HAS_REFERENCE] else None
            state = dist_checkpointing.load(self._state(saved, is_loading=True), str(folder / STATE))
            if saved is not None:
                _restore(saved, state["reference"])
            _restore(self._model.module, state["model"])
            self._optimizer.load_state(state["optimizer"])
            if self._value_head is not None:
                self._value_head.load_state(state[VALUE])
        return counts

    def _state(self, reference: Any | None, *, is_loading: bool) -> dict[str, Any]:
        model = _weights(self._model.module)
        state = {"model": model, "optimizer": self._optimizer.state(model, is_loading=is_loading)}
        if reference is not None:
            state["reference"] = _weights(reference)
            add_prefix_for_sharding(state["reference"], "reference.")
        return state


def load_weights(folder: Path, chunk: Any) -> tuple[str, ...]:
    """Restore only the weights of a model, in place; TrainError if they belong to another model.

    Returns the names of the checkpoint's other parts: a value function, if there is one.
    """
    with _reading(folder):
        state = dist_checkpointing.load({"model": _weights(chunk)}, str(folder / STATE))
        _restore(chunk, state["model"])
    return (VALUE,) if VALUE in state else ()


def _weights(module: Any) -> dict[str, Any]:
    """This process's slices of the trained weights; all others are unchanged from the model's folder."""
    module = _unwrapped(module)
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    has_adapters = any(".adapter." in name for name in trained)
    # a tensor for each layer instead of one for all layers, since only some of them may have adapters
    slices = module.sharded_state_dict(metadata={"non_homogeneous_layers": True} if has_adapters else None)
    return {name: slices[name] for name in slices if name in trained}


def _restore(module: Any, weights: Mapping[str, Any]) -> None:
    """Load weights that were read under the names of `_weights`."""
    _, unknown = _unwrapped(module).load_state_dict(weights, strict=False)
    assert not unknown, f"weights without a module: {unknown[:3]}"


def _unwrapped(module: Any) -> Any:
    """The model without its 16-bit wrapper, whose names do not appear in checkpoints."""
    return unwrap_model([module])[0]


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, CheckpointingException) as error:
        raise TrainError(f"{folder}: {broken_checkpoint(error)}") from error
    except CheckpointException as error:  # holds the failures of all ranks; not a subclass of Exception
        failed = [cause for cause, _ in error.failures.values() if isinstance(cause, Exception)]
        raise TrainError(f"{folder}: {broken_checkpoint(failed[0] if failed else RuntimeError(error))}") from error


def _write(file: Path, counts: Mapping[str, int]) -> None:
    file.write_text(json.dumps(dict(counts)))
