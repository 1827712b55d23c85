"""The forward pass of a decode step: from the newest token of every row to the logits of the next.

Axes: `B` rows of the decode batch, `W` vocabulary, `X` pages of the longest row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from fovea.models.decoder import Attend, DecoderShape, decode
from fovea.models.vlm import VLM
from fovea.rollout.embedded.batch import DecodeStep
from fovea.rollout.embedded.cache import Cache
from fovea.rollout.embedded.linears import TextWeights
from fovea.rollout.embedded.paged_cache import SCRATCH, PagedCache

SMALL_STEP, LARGE_STEP, LAST_OF_SMALL_STEPS = 16, 32, 128
"""Multiples of rows that graphs are captured for. Below some 300 rows, decoding is bound by reading weights, so that a
few rows more cost little."""

Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Captures a function without arguments; the result replays it on the same memory."""


class Stepper:
    """Runs decode steps eagerly."""

    def __init__(self, vlm: VLM, weights: TextWeights, shape: DecoderShape, cache: Cache) -> None:
        self._vlm, self._weights, self._shape, self._cache = vlm, weights, shape, cache

    def __call__(self, step: DecodeStep) -> Tensor:
        """Compute logits [B, W] in float32."""
        attend = self._cache.step(step.stored_B, step.longest, step.level)
        return self.logits(step.token_B, step.position_B, attend)

    def logits(self, token_B: Tensor, position_B: Tensor, attend: Attend) -> Tensor:
        hidden_BE = self._weights.embed[token_B]
        # text tokens have one position on all M-RoPE axes
        rope = self._vlm.rope(position_B.expand(3, -1), hidden_BE)
        return self._weights.logits(decode(self._weights.decoder, self._shape, hidden_BE, rope, attend))


class GraphStepper(Stepper):
    """Replays decode steps as CUDA graphs; valid while weights and page pool keep their addresses."""

    def __init__(
        self, vlm: VLM, weights: TextWeights, shape: DecoderShape, cache: PagedCache, capture: Capture
    ) -> None:
        super().__init__(vlm, weights, shape, cache)
        self._pages = cache
        self._graphs = DecodeGraphs(self._run, capture)

    def __call__(self, step: DecodeStep) -> Tensor:
        return self._graphs(
            GraphInputs(
                token_B=step.token_B,
                position_B=step.position_B,
                tokens_B=self._pages.tokens(step.stored_B),
                table_BX=self._pages.table_BX,
            )
        )

    def _run(self, inputs: GraphInputs) -> Tensor:
        attend = self._pages.attention(inputs.table_BX, inputs.tokens_B)
        return self.logits(inputs.token_B, inputs.position_B, attend)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInputs:
    """Inputs of a captured decode step, besides weights and pages."""

    token_B: Tensor
    position_B: Tensor
    tokens_B: Tensor
    """Tokens of each row in the cache."""
    table_BX: Tensor

    def copy_from(self, other: GraphInputs) -> None:
        """Copy the inputs into the first rows, and pad the others."""
        rows = len(other.token_B)
        for field in fields(self):
            getattr(self, field.name)[:rows].copy_(getattr(other, field.name))
        # padding rows attend to one token of the scratch page, and write there
        self.tokens_B[rows:] = 0
        self.table_BX[rows:] = SCRATCH


StepFunction = Callable[[GraphInputs], Tensor]
"""The captured computation: logits [B, W]."""


def rerun(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Stand-in for a capture: returns the function itself. Tests use it to cover padding and choice of graph."""
    return function


class CudaCapture:
    """Captures CUDA graphs whose memory is one pool; not run by the tests, which have no CUDA device.

    What one graph leaves is overwritten by the next, so that all of them take the memory of the largest. An output must
    be read before another graph is replayed.
    """

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        # a first run outside of the capture, on a side stream, as PyTorch's manual asks: libraries start themselves
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = function()
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


def captured_rows(rows: int) -> int:
    """Number of rows of the graph that runs so many, of which the others are padding.

    Every row of padding costs its logits. Powers of two up to 16, then multiples of 16, from 128 on of 32: at most 31
    rows of padding, and 24 graphs up to 512 rows.
    """
    if rows <= SMALL_STEP:
        return 1 << (rows - 1).bit_length()
    step = SMALL_STEP if rows <= LAST_OF_SMALL_STEPS else LARGE_STEP
    return -(-rows // step) * step


class DecodeGraphs:
    """CUDA graphs of the decode step, captured on demand: one per number of rows (`captured_rows`) and table width."""

    def __init__(self, run: StepFunction, capture: Capture) -> None:
        """Capture calls of `run`, which must read and write the same memory as long as this object is in use."""
        self._run, self._capture = run, capture
        self._graphs: dict[tuple[int, int], tuple[GraphInputs, Callable[[], Tensor]]] = {}
        """Static inputs and replay function by (rows, width of the page table)."""

    def __call__(self, inputs: GraphInputs) -> Tensor:
        """Compute logits [B, W]; the next call overwrites them."""
        rows, width = inputs.table_BX.shape
        size = captured_rows(rows)
        if (size, width) not in self._graphs:
            self._graphs[size, width] = self._captured(inputs, size)
        static, replay = self._graphs[size, width]
        static.copy_from(inputs)
        return replay()[:rows]

    def _captured(self, inputs: GraphInputs, size: int) -> tuple[GraphInputs, Callable[[], Tensor]]:
        # the graph reads these tensors at every replay: inputs are copied into them
        tensors = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
        static = GraphInputs(**{name: x.new_zeros(size, *x.shape[1:]) for name, x in tensors.items()})
        return static, self._capture(lambda: self._run(static))
