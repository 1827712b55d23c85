"""What the loop asks of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fovea.types import Batch, Metrics, Weights


class Policy(Protocol):
    """The model being trained, on one device or many."""

    def start_here(self) -> None:
        """RL begins with the weights as they are now, after a warm-up: they are the reference of the KL term."""
        ...

    def logprobs(self, batch: Batch) -> Sequence[NDArray[np.float32]]:
        """Log-probs [T] of every sample under the current weights, in the order of the batch."""
        ...

    def reference_logprobs(self, batch: Batch) -> Sequence[NDArray[np.float32]]:
        """The same under the weights that RL began with."""
        ...

    def logprobs_and_values(self, batch: Batch) -> tuple[Sequence[NDArray[np.float32]], Sequence[NDArray[np.float32]]]:
        """Log-probs and values, each [T] of every sample, where the value function is on the policy's trunk."""
        ...

    def values(self, batch: Batch) -> Sequence[NDArray[np.float32]]:
        """Values [T] of every sample, where the value function has a model of its own."""
        ...

    def update(self, batch: Batch) -> Metrics:
        """All optimizer steps of one batch."""
        ...

    def weights(self) -> Weights:
        """Current weights under their Hugging Face names, adapters merged; not copied where they need not be."""
        ...

    def save(self, folder: Path) -> None:
        """Everything that `load` needs to go on bit for bit."""
        ...

    def load(self, folder: Path) -> None:
        """Take the state of a folder that `save` wrote."""
        ...
