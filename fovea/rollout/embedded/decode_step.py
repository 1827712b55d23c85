"""A decode step: from the newest token of every row to the next one, sampled from the network's logits.

Axes: `B` rows of the decode batch, `W` vocabulary, `X` pages of the longest row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from fovea.models.decoder import Attend, DecoderShape, decode
from fovea.models.vlm import VLM
from fovea.rollout.embedded.batch import DecodeStep
from fovea.rollout.embedded.cache import Cache
from fovea.rollout.embedded.linears import TextWeights
from fovea.rollout.embedded.paged_cache import SCRATCH, PagedCache, SharedPrompts
from fovea.rollout.embedded.sampler import Draw, RowSettings, SamplingNeeds, sample_tokens
from fovea.utils.tensor_records import map_tensors

FEWEST_ROWS, LAST_DOUBLING = 8, 256
"""Numbers of rows for which graphs are captured: 8 and its doublings, and beyond 256 also the middle of two doublings.
Below about 300 rows decoding is bound by reading weights, so padding rows are cheap: with these 8 captures, they cost
about 5 % of the decode steps of 512 rows that finish one after the other. Sizes in steps of 16 and 32 rows would cost
1.5 %, but need 24 captures."""

Output = TypeVar("Output")
SampledTokens: TypeAlias = tuple[Tensor, Tensor]
"""Tokens [B] and their log-probs [B]."""
Capture = Callable[[Callable[[], SampledTokens]], Callable[[], SampledTokens]]
"""Captures a function without arguments; returns a function that replays it on the same memory."""


class Stepper:
    """Runs decode steps eagerly."""

    def __init__(self, vlm: VLM, weights: TextWeights, shape: DecoderShape, cache: Cache) -> None:
        self._vlm, self._weights, self._shape, self._cache = vlm, weights, shape, cache

    def __call__(self, step: DecodeStep) -> SampledTokens:
        """Sample the next token of every row."""
        attend = self._cache.step(step.stored_B, step.longest, step.level)
        return sample_tokens(self.logits(step.token_B, step.position_B, attend), step.draw)

    def logits(self, token_B: Tensor, position_B: Tensor, attend: Attend) -> Tensor:
        """Compute logits [B, W] in float32."""
        hidden_BE = self._weights.embed[token_B]
        scan = None if self._cache.states is None else self._cache.states.step
        rope = self._vlm.text_rope(position_B, hidden_BE)
        return self._weights.logits(decode(self._weights.decoder, self._shape, hidden_BE, rope, attend, scan=scan))


class GraphStepper:
    """Replays decode steps as CUDA graphs; valid while weights and page pool keep their addresses.

    Sampling is part of the graph: it consists of about fifty small kernels, which the host would launch one by one.
    """

    def __init__(self, eager: Stepper, cache: PagedCache, banned_K: Tensor, capture: Capture) -> None:
        self._pages = cache
        # not a bound method: a reference cycle would keep the page pool alive until a garbage collection
        self._graphs = DecodeGraphs(partial(_decode_and_sample, eager, cache, banned_K), capture)

    def __call__(self, step: DecodeStep) -> SampledTokens:
        """Sample the next token of every row."""
        return self._graphs(
            step.draw.needs,
            GraphInputs(
                token_B=step.token_B,
                position_B=step.position_B,
                tokens_B=self._pages.tokens(step.stored_B),
                table_BX=self._pages.table_BX,
                shared=self._pages.shared,
                uniform_B=step.draw.uniform_B,
                settings=step.draw.settings,
            ),
        )


def _decode_and_sample(
    eager: Stepper, pages: PagedCache, banned_K: Tensor, inputs: GraphInputs, needs: SamplingNeeds
) -> SampledTokens:
    """Decode and sample from static inputs; this is the function that is captured."""
    attend = pages.attention(inputs.table_BX, inputs.tokens_B, inputs.shared)
    draw = Draw(uniform_B=inputs.uniform_B, settings=inputs.settings, needs=needs, banned_K=banned_K)
    return sample_tokens(eager.logits(inputs.token_B, inputs.position_B, attend), draw)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInputs:
    """Inputs of a captured decode step that have one entry per row; weights, pages and banned ids are not included."""

    token_B: Tensor
    position_B: Tensor
    tokens_B: Tensor
    """Number of tokens of each row in the cache."""
    table_BX: Tensor
    shared: SharedPrompts
    uniform_B: Tensor
    settings: RowSettings

    def copy_from(self, other: GraphInputs) -> None:
        """Copy inputs into the first rows, and make the remaining rows padding."""
        rows = len(other.token_B)
        map_tensors(lambda mine, others: mine[:rows].copy_(others), self, other)
        # padding rows attend to one token of the scratch page, and write there; their sampled tokens are never read
        self.tokens_B[rows:] = 0
        self.table_BX[rows:] = SCRATCH
        self.shared.tokens_B[rows:] = 0
        self.shared.mates_BR[rows:] = -1


StepFunction = Callable[[GraphInputs, SamplingNeeds], SampledTokens]
"""The computation to capture; the sampling operations that are needed are fixed at the capture."""


def rerun(function: Callable[[], SampledTokens]) -> Callable[[], SampledTokens]:
    """Return the function itself instead of capturing it; tests use this to cover padding and the choice of graph."""
    return function


class CudaCapture:
    """Captures CUDA graphs that share one memory pool; not covered by the tests, which run without a CUDA device.

    Each graph overwrites the results of the others, so that all of them together need the memory of the largest one. An
    output must be read before another graph is replayed.
    """

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, function: Callable[[], Output]) -> Callable[[], Output]:
        # a warm-up run on a side stream, as PyTorch's documentation requires: libraries initialize on first use
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # one pool for all graphs, which are never replayed at the same time; calls of other threads end no capture
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = function()
        self._pool = graph.pool()

        def replay() -> Output:
            graph.replay()
            return output

        return replay


def captured_rows(rows: int) -> int:
    """Number of rows of the graph that decodes this many rows; the remaining ones are padding."""
    doubling = max(FEWEST_ROWS, 1 << (rows - 1).bit_length())
    middle = doubling * 3 // 4
    return middle if rows <= middle and doubling > LAST_DOUBLING else doubling


class GraphKey(NamedTuple):
    """Shapes and sampling operations for which a graph is captured."""

    rows: int
    pages: int
    """Width of the page table."""
    mates: int
    """Width of the table of rows that share a prompt."""
    needs: SamplingNeeds


class DecodeGraphs:
    """CUDA graphs of the decode step, by number of rows (`captured_rows`), widths of the tables, and sampling needs.

    The first step captures all sizes up to its own, the largest first: the others then fit into its memory, and nothing
    is left to capture as rows finish.
    """

    def __init__(self, run: StepFunction, capture: Capture) -> None:
        """`run` is the function to capture; it must read and write the same memory while this object is in use."""
        self._run, self._capture = run, capture
        self._graphs: dict[GraphKey, tuple[GraphInputs, Callable[[], SampledTokens]]] = {}
        """Static inputs and replay functions."""

    def __call__(self, needs: SamplingNeeds, inputs: GraphInputs) -> SampledTokens:
        """Sample the next token of every row; the next call overwrites the results."""
        rows, pages = inputs.table_BX.shape
        key = GraphKey(captured_rows(rows), pages, inputs.shared.mates_BR.shape[1], needs)
        if key not in self._graphs:
            self._capture_up_to(key, inputs)
        static, replay = self._graphs[key]
        # the graph reads from the addresses at which it was captured
        static.copy_from(inputs)
        token_B, logprob_B = replay()
        return token_B[:rows], logprob_B[:rows]

    def _capture_up_to(self, largest: GraphKey, inputs: GraphInputs) -> None:
        for size in sorted({captured_rows(rows) for rows in range(1, largest.rows + 1)}, reverse=True):
            key = largest._replace(rows=size)
            if key not in self._graphs:
                self._graphs[key] = self._captured(inputs, size, largest.needs)

    def _captured(
        self, inputs: GraphInputs, size: int, needs: SamplingNeeds
    ) -> tuple[GraphInputs, Callable[[], SampledTokens]]:
        # every replay reads these tensors, into which inputs are copied; page 0 is the scratch page
        static = map_tensors(lambda x: x.new_zeros(size, *x.shape[1:]), inputs)
        return static, self._capture(partial(self._run, static, needs))
