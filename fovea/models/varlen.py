"""Attention within segments of a packed row: every segment of queries attends to its own segment of keys.

`FlashSegments` calls the variable-length kernels of torch, on CUDA in 16 bits; `PlainSegments`, its slow twin on any
device, computes one segment after another by the formula. Both give the log-sum-exp of the scores, and both take output
and log-sum-exp of their backward pass from the caller, so that the softmax may extend over further keys
(`models.shared_prefix.attention_cuda`).

Axes: `N` query tokens, `M` key tokens, `H` query heads, `J` key heads, `D` width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn  # its module registers `torch_attn`

from fovea.models.torch_versions import shared_keys
from fovea.models.transfer import to_device

OPS: Any = torch.ops.torch_attn
CAUSAL, ALL = (-1, 0), (-1, -1)
"""Window of keys that a query sees, to the left and right of its own place, with -1 for no limit."""
Triple = tuple[Tensor, Tensor, Tensor]
"""Queries [N, H, D], keys [M, J, D] and values [M, J, D], or their gradients."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Lengths of consecutive segments, on the host and as the kernels read them."""

    lengths: tuple[int, ...]
    offsets: Tensor
    """Start of each segment, and the end of the last, int32."""

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> Segments:
        """Segments of these lengths, for tensors on a device."""
        offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return Segments(tuple(lengths), to_device(offsets, device))

    @property
    def longest(self) -> int:
        return max(self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Which segment of keys each segment of queries attends to: that of the same number."""

    queries: Segments
    keys: Segments
    causal: bool
    """A query sees the keys up to its own place, where the ends of both segments are aligned; else all of them."""
    scale: float
    """Factor on scores."""

    @property
    def window(self) -> list[int]:
        return list(CAUSAL if self.causal else ALL)


class SegmentAttention(Protocol):
    """Attention of segments of queries to segments of keys."""

    def forward(self, inputs: Triple, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Output [N, H, D], and log-sum-exp [H, N] of the scaled scores, in float32."""
        ...

    def backward(self, gradient: Tensor, inputs: Triple, out: Tensor, lse: Tensor, pairs: Pairs) -> Triple:
        """Gradients of the inputs from that of the output [N, H, D].

        With output and log-sum-exp of a softmax over these and other keys, they are these keys' summands.
        """
        ...


class FlashSegments:
    """The kernels behind `torch.nn.attention.varlen`, whose public function drops the gradient of a log-sum-exp."""

    def forward(self, inputs: Triple, pairs: Pairs) -> tuple[Tensor, Tensor]:
        query, key, _ = inputs
        out, lse, _ = OPS._varlen_attn(
            *inputs,
            pairs.queries.offsets,
            pairs.keys.offsets,
            pairs.queries.longest,
            pairs.keys.longest,
            pairs.causal,
            scale=pairs.scale,
            window_size=pairs.window,
            **shared_keys(query, key),
        )
        return out, lse

    def backward(self, gradient: Tensor, inputs: Triple, out: Tensor, lse: Tensor, pairs: Pairs) -> Triple:
        # read by dropout alone, of which there is none
        random_state = torch.zeros(2, dtype=torch.uint64, device=out.device)
        gradients: Triple = OPS._varlen_attn_backward(
            gradient.contiguous(),
            *inputs,
            out,
            lse.contiguous(),
            pairs.queries.offsets,
            pairs.keys.offsets,
            pairs.queries.longest,
            pairs.keys.longest,
            pairs.causal,
            random_state,
            scale=pairs.scale,
            window_size=pairs.window,
        )
        return gradients


class PlainSegments:
    """The formulas of softmax attention and of its gradient (Dao, arXiv 2307.08691, section 2), in float32."""

    def forward(self, inputs: Triple, pairs: Pairs) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for query_HND, key_HMD, value_HMD in _segments(inputs, pairs):
            scores_HNM = _scores(query_HND, key_HMD, pairs)
            lse_HN = scores_HNM.logsumexp(-1)
            outs.append(((scores_HNM - lse_HN[..., None]).exp() @ value_HMD).transpose(0, 1))
            lses.append(lse_HN)
        return torch.cat(outs).to(inputs[0].dtype), torch.cat(lses, 1)

    def backward(self, gradient: Tensor, inputs: Triple, out: Tensor, lse: Tensor, pairs: Pairs) -> Triple:
        of_queries, of_keys, of_values = [], [], []
        times = inputs[0].shape[1] // inputs[1].shape[1]
        of_segments = zip(
            _segments(inputs, pairs),
            gradient.float().split(pairs.queries.lengths),
            out.float().split(pairs.queries.lengths),
            lse.split(pairs.queries.lengths, 1),
            strict=True,
        )
        for (query_HND, key_HMD, value_HMD), gradient_NHD, out_NHD, lse_HN in of_segments:
            gradient_HND = gradient_NHD.transpose(0, 1)
            probs_HNM = (_scores(query_HND, key_HMD, pairs) - lse_HN[..., None]).exp()
            inner_HN = (gradient_NHD * out_NHD).sum(-1).t()
            of_scores_HNM = probs_HNM * (gradient_HND @ value_HMD.mT - inner_HN[..., None]) * pairs.scale
            of_queries.append((of_scores_HNM @ key_HMD).transpose(0, 1))
            of_keys.append(_sum_of_heads(of_scores_HNM.mT @ query_HND, times))
            of_values.append(_sum_of_heads(probs_HNM.mT @ gradient_HND, times))
        of_query, of_key, of_value = (torch.cat(x).to(inputs[0].dtype) for x in (of_queries, of_keys, of_values))
        return of_query, of_key, of_value


def segment_attention_on(device: torch.device) -> SegmentAttention:
    """The implementation for a device."""
    return PlainSegments() if device.type == "cpu" else FlashSegments()


def _segments(inputs: Triple, pairs: Pairs) -> list[Triple]:
    """Inputs of each segment with one key head for each query head, [H, N, D] and [H, M, D], in float32."""
    query, key, value = (x.float().transpose(0, 1) for x in inputs)
    times = len(query) // len(key)
    key, value = key.repeat_interleave(times, 0), value.repeat_interleave(times, 0)
    parts = (
        query.split(pairs.queries.lengths, 1),
        key.split(pairs.keys.lengths, 1),
        value.split(pairs.keys.lengths, 1),
    )
    return list(zip(*parts, strict=True))


def _scores(query_HND: Tensor, key_HMD: Tensor, pairs: Pairs) -> Tensor:
    scores_HNM = query_HND @ key_HMD.mT * pairs.scale
    if not pairs.causal:
        return scores_HNM
    num_queries, num_keys = scores_HNM.shape[1:]
    seen_NM = torch.ones(num_queries, num_keys, dtype=torch.bool, device=scores_HNM.device).tril(num_keys - num_queries)
    return scores_HNM.masked_fill(~seen_NM, -torch.inf)


def _sum_of_heads(x_HMD: Tensor, times: int) -> Tensor:
    """Gradient [M, J, D] of key heads, each of which so many query heads read."""
    sum_JMD: Tensor = x_HMD.unflatten(0, (-1, times)).sum(1)
    return sum_JMD.transpose(0, 1)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What decides whether a kernel takes some tensors."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    key_heads: int
    width: int

    @staticmethod
    def of(query: Tensor, key: Tensor) -> HeadShape:
        """The shape of queries [N, H, D] and keys [M, J, D]."""
        return HeadShape(query.device, query.dtype, query.shape[1], key.shape[1], query.shape[2])

    def zeros(self) -> tuple[Tensor, Tensor]:
        """Queries and keys of two tokens."""
        return self._zeros(self.heads), self._zeros(self.key_heads)

    def _zeros(self, heads: int) -> Tensor:
        return torch.zeros(2, heads, self.width, dtype=self.dtype, device=self.device)


def why_refused(trial: Callable[[], object]) -> str | None:
    """The first line of the error with which a kernel refuses a trial call; None where it runs.

    No table of the supported types, widths and devices is published.
    """
    try:
        trial()
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:  # by torch's version, any of these
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None


@lru_cache(maxsize=64)
def flash_refusal(shape: HeadShape) -> str | None:
    """Why `FlashSegments` cannot run on tensors of this shape; None where it can, forward and backward."""

    def trial() -> None:
        query, key = shape.zeros()
        two = Segments.of([2], shape.device)
        flash, inputs = FlashSegments(), (query, key, key)
        for causal in (True, False):
            pairs = Pairs(queries=two, keys=two, causal=causal, scale=1.0)
            out, lse = flash.forward(inputs, pairs)
            flash.backward(out, inputs, out, lse, pairs)
        _wait(shape.device)

    return why_refused(trial)


@lru_cache(maxsize=64)
def varlen_refusal(shape: HeadShape) -> str | None:
    """Why torch's public `varlen_attn` cannot run on tensors of this shape; None where it can, forward and backward."""

    @torch.enable_grad()
    def trial() -> None:
        query, key = (x.requires_grad_() for x in shape.zeros())
        offsets = Segments.of([2], shape.device).offsets
        gqa = shared_keys(query, key)
        out = varlen_attn(query, key, key, offsets, offsets, 2, 2, scale=1.0, window_size=CAUSAL, **gqa)
        assert isinstance(out, Tensor)
        out.sum().backward()
        _wait(shape.device)

    return why_refused(trial)


def takes_varlen(shape: HeadShape) -> bool:
    """Whether torch's public `varlen_attn` runs on tensors of this shape."""
    return shape.device.type != "cpu" and varlen_refusal(shape) is None


def _wait(device: torch.device) -> None:
    # an error of the kernel itself is raised at the next call that waits for it
    if device.type == "cuda":
        torch.cuda.synchronize(device)
