"""Captured decoding steps: one CUDA graph per power-of-two number of rows, replayed without launching its operators.

Padding, inputs and the choice of graph are tested with `rerun` in the place of a capture; the capture itself needs
CUDA and is not run by the tests.

Axes: `B` live completions, `X` pages of the longest row, `W` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from fovea.rollout.embedded.paged_cache import SCRATCH


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInputs:
    """All that a step reads besides weights and pages."""

    token_B: Tensor
    position_B: Tensor
    tokens_B: Tensor
    """In the cache, per row."""
    table_BX: Tensor

    def copy_from(self, other: GraphInputs) -> None:
        """Into the first rows; rows behind them write to the scratch page."""
        rows = len(other.token_B)
        for field in fields(self):
            getattr(self, field.name)[:rows].copy_(getattr(other, field.name))
        self.tokens_B[rows:] = 0
        self.table_BX[rows:] = SCRATCH


Run = Callable[[GraphInputs], Tensor]
"""Logits [B, W]."""
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""From a function without arguments to one that does the same again on the same memory."""


def rerun(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """No capture: the function itself."""
    return function


def cuda_capture(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A CUDA graph; the first run outside of it lets libraries set themselves up, as PyTorch's manual asks."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay


class DecodeGraphs:
    """Runs a step through the graph of the next power of two."""

    def __init__(self, run: Run, capture: Capture) -> None:
        """`run` must read and write the same memory for as long as this object is used."""
        self._run, self._capture = run, capture
        self._graphs: dict[tuple[int, int], tuple[GraphInputs, Callable[[], Tensor]]] = {}
        """By rows and width of the table."""

    def __call__(self, inputs: GraphInputs) -> Tensor:
        """Logits of the live rows, to be used before the next call."""
        rows, width = inputs.table_BX.shape
        size = 1 << (rows - 1).bit_length()
        if (size, width) not in self._graphs:
            self._graphs[size, width] = self._captured(inputs, size)
        static, replay = self._graphs[size, width]
        static.copy_from(inputs)
        return replay()[:rows]

    def _captured(self, inputs: GraphInputs, size: int) -> tuple[GraphInputs, Callable[[], Tensor]]:
        tensors = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
        static = GraphInputs(**{name: x.new_zeros(size, *x.shape[1:]) for name, x in tensors.items()})
        return static, self._capture(lambda: self._run(static))
