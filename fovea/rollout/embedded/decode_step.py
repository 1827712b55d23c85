"""One decoding step of all rows, from the tokens drawn last to the logits of the next.

Axes: `B` live completions, `W` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from fovea.models.decoder import Attend, DecoderShape, decode
from fovea.models.vlm import VLM
from fovea.rollout.embedded.batch import DecodeStep
from fovea.rollout.embedded.cache import Cache
from fovea.rollout.embedded.linears import TextWeights
from fovea.rollout.embedded.paged_cache import SCRATCH, PagedCache

Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""From a function without arguments to one that does the same again on the same memory."""


class Stepper:
    """Runs steps operator by operator."""

    def __init__(self, vlm: VLM, weights: TextWeights, shape: DecoderShape, cache: Cache) -> None:
        self._vlm, self._weights, self._shape, self._cache = vlm, weights, shape, cache

    def __call__(self, step: DecodeStep) -> Tensor:
        """Logits [B, W] in float32."""
        attend = self._cache.step(step.stored_B, step.longest, step.level)
        return self.logits(step.token_B, step.position_B, attend)

    def logits(self, token_B: Tensor, position_B: Tensor, attend: Attend) -> Tensor:
        hidden_BE = self._weights.embed[token_B]
        rope = self._vlm.rope(position_B.expand(3, -1), hidden_BE)
        return self._weights.logits(decode(self._weights.decoder, self._shape, hidden_BE, rope, attend))


class GraphStepper(Stepper):
    """Runs steps as captured graphs over a paged cache, as long as weights and pool stay where they are."""

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
    """Decoding steps as CUDA graphs, one per power-of-two number of rows, replayed without launching operators.

    Padding, inputs and the choice of graph are tested with `rerun` in the place of a capture; the capture itself needs
    CUDA and is not run by the tests.
    """

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
