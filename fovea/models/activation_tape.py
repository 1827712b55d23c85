"""Activation tape: outputs of the decoder's linear layers for every token of a rollout, reused by its update.

While the weights are those of the rollout, a token has the same linear outputs in the update, whose forward pass reads
them from the tape (`models.trained_layer`) and computes only norms, rotary positions, attention and the head. Exact up
to the rounding of matrix products of another shape; `train.plain_update_every_steps` keeps comparing with an update
that reads nothing.

Axes: `N` tokens. A place is a token's index on the tape.
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

from fovea.models.vision.feature_cache import ImageFeatures


class LinearGroup(IntEnum):
    """Groups of linear layers that share an input, in the order in which a decoder layer runs them."""

    QKV = 0
    OUTPUT = 1
    GATE_UP = 2
    DOWN = 3


ImageGraph = Mapping[str, ImageFeatures]
"""Image features by image key, with their autograd graph."""
NOT_RECORDED = -1
"""The place of a token that is not on the tape."""


class Tape:
    """A block [capacity, width] per layer and group of linear layers, written by the engine, read by the trainer."""

    def __init__(self, widths: Sequence[Sequence[int]], max_bytes: float, dtype: torch.dtype) -> None:
        """`widths` are the output widths of the LinearGroups of each decoder layer; empty to keep image graphs only."""
        self._max_bytes = max_bytes
        self._token_bytes = sum(map(sum, widths)) * dtype.itemsize
        capacity_tokens = int(max_bytes // self._token_bytes) if self._token_bytes else 0
        # torch.empty reserves addresses only: the system backs a page with memory when it is first written
        self._blocks = [[torch.empty(capacity_tokens, width, dtype=dtype) for width in layer] for layer in widths]
        self._reserved_bytes = 0
        self._used = 0
        self._pass = slice(0, 0)
        self.graphs: list[ImageGraph] = []
        self._traces: dict[str, Trace] = {}
        """Traces of this rollout by completion id."""
        self.is_current = False
        """True while no weight has changed since `restart`: an update may reuse what is recorded."""

    @property
    def holds_linears(self) -> bool:
        """True if linear outputs are recorded, False if image graphs only."""
        return self._token_bytes > 0

    def layer(self, index: int) -> list[TapeColumn]:
        """Destinations of the linear outputs of one decoder layer, one for each LinearGroup."""
        return [TapeColumn(self, index, group) for group in LinearGroup]

    def restart(self) -> None:
        """Discard all records, which are of older weights; called when the engine has the present ones."""
        self.is_current = True
        self._reserved_bytes = self._used = 0
        self.graphs = []
        self._traces = {}

    def keep_trace(self, completion_id: str, trace: Trace) -> None:
        """Keep the trace of a completion until `restart`."""
        self._traces[completion_id] = trace

    def trace(self, completion_id: str) -> Trace | None:
        """Trace of a completion; None if it was not recorded, or the weights have changed since."""
        return self._traces.get(completion_id)

    def keep_graph(self, graph: ImageGraph) -> int:
        """Keep image features with their autograd graph; returns the graph's number."""
        self.graphs.append(graph)
        return len(self.graphs) - 1

    def graph(self, number: int) -> ImageGraph:
        """Image features by the number that `keep_graph` returned; empty after `free_graphs`."""
        return self.graphs[number]

    def free_graphs(self) -> None:
        """Free all image graphs."""
        # empty mappings instead of an empty list: traces still hold the numbers
        self.graphs = [{} for _ in self.graphs]

    def reserve(self, tokens: int, other_bytes: int = 0) -> bool:
        """Reserve space for more tokens and for `other_bytes` that are kept elsewhere; False if they do not fit."""
        needed = tokens * self._token_bytes + other_bytes
        if self._reserved_bytes + needed > self._max_bytes:
            return False
        self._reserved_bytes += needed
        return True

    @contextmanager
    def recording(self, tokens: int) -> Iterator[int]:
        """Record the linear outputs of the forward pass in this context; yields the place of its first token."""
        # places are never reused before `restart`, so that a trace stays valid as long as the weights
        start = self._used
        self._used += tokens
        self._pass = slice(start, self._used)
        try:
            yield start
        finally:
            self._pass = slice(0, 0)

    def rows(self, layer: int, group: LinearGroup, tokens: int) -> Tensor | None:
        """The part [tokens, width] of a block that this pass writes to; None if the pass is not recorded."""
        if self._pass.start == self._pass.stop:
            return None
        # a view: the matrix product writes into the tape, and nothing is copied
        rows = self._blocks[layer][group][self._pass]
        assert len(rows) == tokens, f"a pass of {tokens} tokens on {len(rows)} places"
        return rows

    def read(self, layer: int, group: LinearGroup, columns: slice, places_N: Tensor) -> Tensor:
        """Some columns of the recorded outputs of the tokens at these places."""
        return self._blocks[layer][group][:, columns].index_select(0, places_N)


@dataclass(frozen=True, slots=True)
class TapeColumn:
    """Destination on the tape of one group of linear layers."""

    tape: Tape
    layer: int
    group: LinearGroup

    def rows(self, tokens: int) -> Tensor | None:
        """The tensor [tokens, width] to write outputs to; None if the pass is not recorded."""
        return self.tape.rows(self.layer, self.group, tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Places on the tape of one completion and of its prompt."""

    prompt_places_L: NDArray[np.int64]
    places_T: NDArray[np.int64]
    """Places of all tokens of the completion but the last, which is never an input."""
    graph_number: int
    """Number of the graph of the images that were encoded together with this prompt's."""

    @property
    def holds_linears(self) -> bool:
        """True if all tokens are on the tape."""
        return len(self.prompt_places_L) > 0 and not (self.places_T == NOT_RECORDED).any()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOutputs:
    """Recorded linear outputs of the tokens of a packed row."""

    tape: Tape
    places_N: Tensor

    def outputs(self, layer: int, wanted: Tensor | None, group: LinearGroup, columns: slice) -> Tensor:
        """Columns of the outputs of a group; after the attention of the last layer, of the `wanted` tokens only."""
        # every token gives queries, keys and values; only later groups run only on the wanted tokens
        behind_attention = group != LinearGroup.QKV
        places = self.places_N[wanted] if wanted is not None and behind_attention else self.places_N
        return self.tape.read(layer, group, columns, places)
