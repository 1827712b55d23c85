"""Attention within segments of a packed row: every segment of queries attends to its own segment of keys.

`FlashSegments` calls torch's variable-length kernels, on CUDA in 16 bits; `PlainSegments`, the slow reference for any
device, evaluates the formula one segment at a time. Both return the log-sum-exp of the scores, and the caller passes
output and log-sum-exp to the backward pass, so that the softmax may extend over further keys
(`models.shared_prefix.attention_cuda`).

Axes: `N` query tokens, `M` key tokens, `H` query heads, `J` key heads, `D` width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import exp
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn  # its module registers `torch_attn`

from fovea.models.torch_versions import shared_keys
from fovea.models.transfer import to_device
from fovea.models.trials import why_refused

OPS: Any = torch.ops.torch_attn
TRIALS = ((40, 2), (130, 40), (300, 1, 257))
"""Segment lengths of each trial: on Hopper, torch 2.14 uses cuDNN's kernel if the longest segment has at least 129
tokens, and kernels have been wrong beyond 256."""
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Largest relative error of a token's values: five times the rounding error of torch's CPU kernels."""
NAMES = ("output", "gradient of queries", "gradient of keys", "gradient of values")
MORE_KEYS = 0.7
CAUSAL, ALL = (-1, 0), (-1, -1)
"""Number of keys that a query sees to the left and to the right of its own position; -1 for no limit."""
Triple = tuple[Tensor, Tensor, Tensor]
"""Queries [N, H, D], keys [M, J, D] and values [M, J, D], or their gradients."""
Attended = Callable[[Triple, Tensor, "Pairs"], dict[str, Tensor]]
"""(inputs, gradient of the output, pairs) -> output and gradients by `NAMES`, perhaps also the log-sum-exp"""


@dataclass(frozen=True, slots=True)
class Segments:
    """Lengths of consecutive segments, on the host and as the kernels read them."""

    lengths: tuple[int, ...]
    offsets: Tensor
    """Start of each segment and end of the last segment; int32."""

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
    """Segments of queries and of keys; each segment of queries attends to the segment of keys with the same index."""

    queries: Segments
    keys: Segments
    causal: bool
    """If true, a query sees the keys up to its own position, with the ends of both segments aligned; else all keys."""
    scale: float
    """Factor on the scores."""

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

        If `out` and `lse` come from a softmax over these and other keys, the results are the terms of these keys.
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
        # read only for dropout, which is not used
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
    """The implementation to use on a device."""
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
    """Gradient [M, J, D] of the key heads, each of which is read by `times` query heads."""
    sum_JMD: Tensor = x_HMD.unflatten(0, (-1, times)).sum(1)
    return sum_JMD.transpose(0, 1)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Properties of tensors that decide whether a kernel supports them."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    key_heads: int
    width: int

    @staticmethod
    def of(query: Tensor, key: Tensor) -> HeadShape:
        """The shape of queries [N, H, D] and keys [M, J, D]."""
        return HeadShape(query.device, query.dtype, query.shape[1], key.shape[1], query.shape[2])


@lru_cache(maxsize=64)
def flash_refusal(shape: HeadShape) -> str | None:
    """Why `FlashSegments` cannot be used for heads of this shape; None if it matches `PlainSegments`."""
    return _refusal(by_segments(FlashSegments(), MORE_KEYS), by_segments(PlainSegments(), MORE_KEYS), shape)


@lru_cache(maxsize=64)
def varlen_refusal(shape: HeadShape) -> str | None:
    """Why torch's public `varlen_attn` cannot be used for heads of this shape; None if it matches `PlainSegments`."""
    return _refusal(_by_torch, by_segments(PlainSegments()), shape)


def takes_varlen(shape: HeadShape) -> bool:
    """True if torch's public `varlen_attn` can be used for heads of this shape."""
    return shape.device.type != "cpu" and varlen_refusal(shape) is None


@torch.inference_mode(mode=False)  # the first caller may be in inference mode, where nothing has gradients
@torch.enable_grad()
def _refusal(attention: Attended, twin: Attended, shape: HeadShape) -> str | None:
    return why_refused(lambda: difference(attention, twin, shape))


def difference(attention: Attended, twin: Attended, shape: HeadShape) -> str | None:
    """How an attention differs from its reference on random heads of this shape; None if it does not."""
    for lengths in TRIALS:
        for pairs in _pairs(lengths, shape):
            given = _random(shape, pairs)
            found = attention(*given, pairs)
            if found[NAMES[0]].is_meta:  # meta tensors have no values
                continue
            for name, expected in twin(*given, pairs).items():
                relative = _relative(found[name].float(), expected.float())
                if not relative <= TOLERANCE[shape.dtype]:
                    return (
                        f"{name} of {'causal' if pairs.causal else 'full'} attention to segments of "
                        f"{', '.join(map(str, pairs.keys.lengths))} tokens: off by {relative:.1e} of its size, "
                        f"more than rounding to {shape.dtype} explains ({TOLERANCE[shape.dtype]:.0e})"
                    )
    return None


def _relative(found: Tensor, expected: Tensor) -> float:
    """Largest relative error of a token; its size includes a mean token's, since the values of some are zero."""
    errors_N, sizes_N = (x.flatten(1).norm(dim=1) for x in (found - expected, expected))
    return float((errors_N / (sizes_N + sizes_N.mean())).max())


def _pairs(lengths: Sequence[int], shape: HeadShape) -> Iterator[Pairs]:
    """Pairs as in packed rows: a segment's own keys, keys of prompt and completion, and keys of another segment."""
    own, scale = Segments.of(lengths, shape.device), shape.width**-0.5
    ends = Segments.of([-(-length // 2) for length in lengths], shape.device)
    others = Segments.of(lengths[::-1], shape.device)
    yield Pairs(queries=own, keys=own, causal=True, scale=scale)
    yield Pairs(queries=ends, keys=own, causal=True, scale=scale)
    yield Pairs(queries=own, keys=others, causal=False, scale=scale)


def _random(shape: HeadShape, pairs: Pairs) -> tuple[Triple, Tensor]:
    """Random queries, keys and values, and a random gradient of the output."""
    random = torch.Generator().manual_seed(0)
    queries, keys = sum(pairs.queries.lengths), sum(pairs.keys.lengths)
    sizes = ((queries, shape.heads), (keys, shape.key_heads), (keys, shape.key_heads), (queries, shape.heads))
    made = (
        to_device(torch.randn(*size, shape.width, generator=random).to(shape.dtype), shape.device) for size in sizes
    )
    query, key, value, gradient = made
    return (query, key, value), gradient


def by_segments(attention: SegmentAttention, more_keys: float = 0.0) -> Attended:
    """Run both passes, the backward pass as if further keys of value 0 had added `more_keys` to each log-sum-exp."""

    def attend(inputs: Triple, gradient: Tensor, pairs: Pairs) -> dict[str, Tensor]:
        out, lse = attention.forward(inputs, pairs)
        of_inputs = attention.backward(gradient, inputs, out * exp(-more_keys), lse + more_keys, pairs)
        return ({"log-sum-exp": lse} if more_keys else {}) | dict(zip(NAMES, (out, *of_inputs), strict=True))

    return attend


def _by_torch(inputs: Triple, gradient: Tensor, pairs: Pairs) -> dict[str, Tensor]:
    query, key, value = (x.detach().requires_grad_() for x in inputs)
    out = varlen_attn(
        query,
        key,
        value,
        pairs.queries.offsets,
        pairs.keys.offsets,
        pairs.queries.longest,
        pairs.keys.longest,
        scale=pairs.scale,
        window_size=CAUSAL if pairs.causal else ALL,
        **shared_keys(query, key),
    )
    assert isinstance(out, Tensor)
    return dict(zip(NAMES, (out.detach(), *torch.autograd.grad(out, (query, key, value), gradient)), strict=True))
