"""Shared-prefix attention on CUDA: torch's variable-length kernels on a whole packed row.

`SharedVarlen` runs them twice: once over the whole row, where every prompt and every completion attends causally to
itself, and once from the completions to their prompts, whose keys are read in place. Outputs are merged by log-sum-exp,
as on CPUs (`models.shared_prefix.attention_cpu`), and the gradients of a prompt's keys are summed inside the kernel.
`GatheredVarlen`, the slow reference, calls torch's public function once, on keys that are gathered for every
completion; index_add sums the gradients of these keys, which is slow on a GPU and not deterministic.

On a CPU both process one segment after another with plain formulas, so that tests can check their indices.

Axes: `S` segments, `M` gathered keys of all segments, `C` completion tokens of the row, `B` tokens of the prompts that
have completions; others as in `models.shared_prefix.attention`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from fovea.models.shared_prefix.layout import SharedPrefixLayout
from fovea.models.torch_versions import shared_keys
from fovea.models.transfer import to_device
from fovea.models.varlen import CAUSAL, Pairs, SegmentAttention, Segments, Triple, segment_attention_on


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedVarlen:
    """Attention function for all layers of one row, with its index tensors."""

    own: Pairs
    """All prompts and completions in the order of the row; each attends to itself."""
    to_prompt: Pairs
    """For each prompt with completions, these as one segment, which attends to the prompt."""
    completion_index_C: Tensor
    prompt_index_B: Tensor

    @staticmethod
    def of(layout: SharedPrefixLayout, scale: float) -> SharedVarlen:
        """The attention function of a row with this layout."""
        device = layout.return_index_N.device
        spans = list(_spans(layout))
        whole = Segments.of([len(span) for prompt, own in spans for span in (prompt, *own)], device)
        with_completions = [(prompt, own) for prompt, own in spans if own]
        return SharedVarlen(
            own=Pairs(queries=whole, keys=whole, causal=True, scale=scale),
            to_prompt=Pairs(
                queries=Segments.of([sum(map(len, own)) for _, own in with_completions], device),
                keys=Segments.of([len(prompt) for prompt, _ in with_completions], device),
                causal=False,
                scale=scale,
            ),
            completion_index_C=_index((span for _, own in with_completions for span in own), device),
            prompt_index_B=_index((prompt for prompt, _ in with_completions), device),
        )

    def __call__(self, query_NHD: Tensor, key_NJD: Tensor, value_NJD: Tensor) -> Tensor:
        """Attention [N, H, D] of a row."""
        out: Tensor = _SharedAttention.apply(  # type: ignore[no-untyped-call]
            query_NHD, key_NJD, value_NJD, self, segment_attention_on(query_NHD.device)
        )
        return out

    @property
    def has_completions(self) -> bool:
        return bool(self.to_prompt.queries.lengths)

    def inputs_to_prompt(self, query_NHD: Tensor, key_NJD: Tensor, value_NJD: Tensor) -> Triple:
        """Queries of the completions, keys and values of their prompts."""
        return (
            query_NHD.index_select(0, self.completion_index_C),
            key_NJD.index_select(0, self.prompt_index_B),
            value_NJD.index_select(0, self.prompt_index_B),
        )


class _SharedAttention(torch.autograd.Function):
    """Both kernel calls as one softmax, with a hand-written gradient: torch's kernels give none for log-sum-exps."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, row: SharedVarlen, attention: SegmentAttention
    ) -> Tensor:
        inputs = (query, key, value)
        out, lse = attention.forward(inputs, row.own)
        if row.has_completions:
            index = row.completion_index_C
            to_prompt = attention.forward(row.inputs_to_prompt(*inputs), row.to_prompt)
            merged = _merge(to_prompt, (out.index_select(0, index), lse.index_select(1, index)))
            out, lse = out.index_copy(0, index, merged[0]), lse.index_copy(1, index, merged[1])
        ctx.save_for_backward(*inputs, out, lse)
        ctx.row, ctx.attention = row, attention
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        row: SharedVarlen = ctx.row
        attention: SegmentAttention = ctx.attention
        query, key, value, out, lse = ctx.saved_tensors
        gradient, inputs = gradients[0], (query, key, value)
        # with output and log-sum-exp of the whole softmax, each call returns its term of the gradient
        of_row = attention.backward(gradient, inputs, out, lse, row.own)
        if row.has_completions:
            index = row.completion_index_C
            of_query, of_key, of_value = attention.backward(
                gradient.index_select(0, index),
                row.inputs_to_prompt(*inputs),
                out.index_select(0, index),
                lse.index_select(1, index),
                row.to_prompt,
            )
            # every index occurs once, so the order of the additions does not matter
            of_row[0].index_add_(0, index, of_query)
            of_row[1].index_add_(0, row.prompt_index_B, of_key)
            of_row[2].index_add_(0, row.prompt_index_B, of_value)
        return *of_row, None, None


def _merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Output [C, H, D] and log-sum-exp [H, C] of a softmax over two sets of keys, from those over each set."""
    (out_1, lse_1), (out_2, lse_2) = first, second
    lse = torch.logaddexp(lse_1, lse_2)
    # the weights exp(l1 - l) and exp(l2 - l) add up to 1, so the merge is one lerp
    weight_CH1 = (lse_1 - lse).exp().t()[..., None]
    return torch.lerp(out_2.float(), out_1.float(), weight_CH1).to(out_1.dtype), lse


@dataclass(frozen=True, slots=True)
class GatheredVarlen:
    """Attention function for all layers of one row, with its index tensors."""

    key_index_M: Tensor
    queries: Segments
    keys: Segments
    scale: float

    @staticmethod
    def of(layout: SharedPrefixLayout, scale: float) -> GatheredVarlen:
        """The attention function of a row with this layout."""
        device = layout.return_index_N.device
        segments = [x for prompt, own in _spans(layout) for x in ([prompt], *([prompt, span] for span in own))]
        return GatheredVarlen(
            key_index_M=_index((span for keys in segments for span in keys), device),
            queries=Segments.of([len(keys[-1]) for keys in segments], device),
            keys=Segments.of([sum(map(len, keys)) for keys in segments], device),
            scale=scale,
        )

    def __call__(self, query_NHD: Tensor, key_NJD: Tensor, value_NJD: Tensor) -> Tensor:
        """Attention [N, H, D] of a row."""
        key_MJD, value_MJD = (x.index_select(0, self.key_index_M) for x in (key_NJD, value_NJD))
        attend = self._one_by_one if query_NHD.device.type == "cpu" else self._kernel
        return attend(query_NHD, key_MJD, value_MJD)

    def _kernel(self, query_NHD: Tensor, key_MJD: Tensor, value_MJD: Tensor) -> Tensor:
        out = varlen_attn(
            query_NHD,
            key_MJD,
            value_MJD,
            self.queries.offsets,
            self.keys.offsets,
            self.queries.longest,
            self.keys.longest,
            scale=self.scale,
            # the kernel aligns the ends of queries and keys, so a completion attends to its whole prompt
            window_size=CAUSAL,
            **shared_keys(query_NHD, key_MJD),
        )
        assert isinstance(out, Tensor)
        return out

    def _one_by_one(self, query_NHD: Tensor, key_MJD: Tensor, value_MJD: Tensor) -> Tensor:
        keys = (x.split(self.keys.lengths) for x in (key_MJD, value_MJD))
        parts = zip(query_NHD.split(self.queries.lengths), *keys, strict=True)
        return torch.cat([_segment(query, key, value, self.scale) for query, key, value in parts])


def _spans(layout: SharedPrefixLayout) -> Iterator[tuple[range, Sequence[range]]]:
    """Indices in the row of each prompt, and of each of its completions that has a token in the row."""
    start = 0
    for num_prompt, lengths in layout.lengths:
        prompt, own = range(start, start + num_prompt), list[range]()
        start += num_prompt
        for length in lengths:
            own += [range(start, start + length)] if length else []
            start += length
        yield prompt, own


def _index(spans: Iterable[range], device: torch.device) -> Tensor:
    return to_device(
        torch.cat([torch.zeros(0, dtype=torch.long), *(torch.arange(x.start, x.stop) for x in spans)]), device
    )


def _segment(query_NHD: Tensor, key_MJD: Tensor, value_MJD: Tensor, scale: float) -> Tensor:
    """Causal attention of one segment; its queries belong to the last tokens of those that have keys."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query_NHD, key_MJD, value_MJD))
    queries, keys = query.shape[2], key.shape[2]
    mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
