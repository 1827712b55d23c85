"""Counts of the tokens that each expert of a mixture runs, to see how evenly a router spreads them.

Axes: `N` tokens, `K` experts of a token, `X` experts of a layer, `Y` decoder layers with experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fovea.utils.host_waits import awaited


class ExpertLoad:
    """Number of tokens that each expert has run since the last `restart`, by decoder layer.

    Gradient checkpointing runs a layer twice and counts it twice, which changes no ratio within the layer.
    """

    def __init__(self) -> None:
        self._counts: dict[int, Tensor] = {}

    def add(self, layer: int, expert_NK: Tensor, num_experts: int) -> None:
        """Count the tokens of one pass through a layer."""
        chosen = expert_NK.flatten()
        # torch.bincount would wait for the device
        count_X = chosen.new_zeros(num_experts).index_add_(0, chosen, torch.ones_like(chosen))
        self._counts[layer] = count_X if layer not in self._counts else self._counts[layer] + count_X

    def restart(self) -> None:
        """Begin to count anew."""
        self._counts = {}

    def counts(self) -> list[list[int]]:
        """The counts [Y, X]; empty without experts."""
        if not self._counts:
            return []
        counts: list[list[int]] = awaited(torch.stack([self._counts[layer] for layer in sorted(self._counts)])).tolist()
        return counts


def imbalance(counts_of_ranks: Sequence[Sequence[Sequence[int]]]) -> float | None:
    """Largest over mean number of tokens of an expert, from the counts [Y, X] of each rank; the mean over layers.

    1 if all experts have the same number, X / K if all tokens run through the same experts; None without counts.
    """
    counts_YX = np.sum(np.array(counts_of_ranks, dtype=np.int64), axis=0)
    return float((counts_YX.max(-1) / counts_YX.mean(-1)).mean()) if counts_YX.size else None
