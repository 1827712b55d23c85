"""What the decoder's linear layers gave for every token of a rollout, so that the update need not compute it again.

While the weights are those of the rollout, a token's linear outputs are the same in the update: its forward pass looks
them up (`models.trained_layer`) and only norms, rotations, attention and the head are computed. Exact up to the
rounding of matrix products of another shape; `train.plain_update_every_steps` keeps comparing with the plain pass.

Axes: `N` tokens; a place is a token's row on the tape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.models.vision.features import ImageFeatures


class LinearGroup(IntEnum):
    """Linear layers of a decoder layer that share an input, in the order in which they run."""

    QKV = 0
    OUTPUT = 1
    GATE_UP = 2
    DOWN = 3


ImageGraph = Mapping[str, ImageFeatures]
NOT_RECORDED = -1
"""The place of a token that is not on the tape."""


class Tape:
    """One block [capacity, width] per group of linear layers, written by the engine, read by the trainer."""

    def __init__(self, widths: Sequence[Sequence[int]], max_bytes: float, dtype: torch.dtype) -> None:
        """`widths`: for each decoder layer, those of its groups of linear layers; none: only images are kept."""
        self._max_bytes = max_bytes
        self._token_bytes = sum(map(sum, widths)) * dtype.itemsize
        capacity_tokens = int(max_bytes // self._token_bytes) if self._token_bytes else 0
        # never touched, never in memory: pages come with the first write
        self._blocks = [[torch.empty(capacity_tokens, width, dtype=dtype) for width in layer] for layer in widths]
        self._reserved_bytes = 0
        self._used = 0
        self._pass = slice(0, 0)
        self._graphs: list[ImageGraph] = []
        self._traces: dict[str, Trace] = {}
        """By completion id; of this rollout only."""

    @property
    def holds_linears(self) -> bool:
        return self._token_bytes > 0

    def layer(self, index: int) -> list[TapeColumn]:
        """For the groups of linear layers of one decoder layer to write to."""
        return [TapeColumn(self, index, group) for group in LinearGroup]

    def restart(self) -> None:
        """New weights: forget everything."""
        self._reserved_bytes = self._used = 0
        self._graphs = []
        self._traces = {}

    def keep_trace(self, completion_id: str, trace: Trace) -> None:
        """Note where a completion's activations stand, until new weights come."""
        self._traces[completion_id] = trace

    def trace(self, completion_id: str) -> Trace | None:
        """Where a completion's activations stand; None when nothing was kept of it, or weights have changed since."""
        return self._traces.get(completion_id)

    def keep_graph(self, graph: ImageGraph) -> int:
        """Features with the graph that made them; returns the number to ask for them by."""
        self._graphs.append(graph)
        return len(self._graphs) - 1

    def graph(self, number: int) -> ImageGraph:
        return self._graphs[number]

    def free_graphs(self) -> None:
        """Nobody will go back through them: their memory is free. Traces that name them find nothing."""
        self._graphs = [{} for _ in self._graphs]

    def reserve(self, tokens: int, other_bytes: int = 0) -> bool:
        """Whether this many more will fit, beside what is kept elsewhere; they are then kept free."""
        needed = tokens * self._token_bytes + other_bytes
        if self._reserved_bytes + needed > self._max_bytes:
            return False
        self._reserved_bytes += needed
        return True

    @contextmanager
    def recording(self, tokens: int) -> Iterator[int]:
        """What the linear layers are asked inside stays on the tape; yields the place of the first token."""
        start = self._used
        self._used += tokens
        self._pass = slice(start, self._used)
        try:
            yield start
        finally:
            self._pass = slice(0, 0)

    def rows(self, layer: int, group: LinearGroup, tokens: int) -> Tensor | None:
        """Where the outputs of this pass go; None when it is not recorded."""
        if self._pass.start == self._pass.stop:
            return None
        rows = self._blocks[layer][group][self._pass]
        assert len(rows) == tokens, f"a pass of {tokens} tokens on {len(rows)} places"
        return rows

    def read(self, layer: int, group: LinearGroup, places_N: Tensor) -> Tensor:
        """Outputs [N, width] of these tokens."""
        return self._blocks[layer][group].index_select(0, places_N)


@dataclass(frozen=True, slots=True)
class TapeColumn:
    """Where one group of linear layers writes."""

    tape: Tape
    layer: int
    group: LinearGroup

    def rows(self, tokens: int) -> Tensor | None:
        return self.tape.rows(self.layer, self.group, tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Where the tape holds the activations of one completion and of its prompt."""

    prompt_places_L: NDArray[np.int64]
    places_T: NDArray[np.int64]
    """One fewer than tokens: the last is never fed back."""
    graph_number: int
    """Of the images that were encoded together with this prompt's."""

    @property
    def holds_linears(self) -> bool:
        """Whether all of its tokens are on the tape."""
        return len(self.prompt_places_L) > 0 and not (self.places_T == NOT_RECORDED).any()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOutputs:
    """What is known of a row before its forward pass."""

    tape: Tape
    places_N: Tensor

    def outputs(self, layer: int, wanted: Tensor | None, group: LinearGroup) -> Tensor:
        """Of one group of linear layers; behind the attention of a last layer, of the `wanted` tokens only."""
        behind_attention = group != LinearGroup.QKV
        places = self.places_N[wanted] if wanted is not None and behind_attention else self.places_N
        return self.tape.read(layer, group, places)
