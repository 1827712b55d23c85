"""Shared-prefix attention on CPU, which merges attention to the prompt and to own tokens by log-sum-exp.

All completions of a prompt attend to its keys in one flash-attention call; keys are not copied, and no dense mask is
made. With outputs o1, o2 and log-sum-exps l1, l2 of the two parts, l = logaddexp(l1, l2) and
o = o1 exp(l1 - l) + o2 exp(l2 - l) (Dao, arXiv 2307.08691, section 2.3).

Blocks of tokens have the axes [P, J, G, Q, T, D] (keys: Q = 1; prompts: G = 1, T = L); the letters are those of
`models.shared_prefix.attention`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fovea.models.shared_prefix.layout import SharedPrefixLayout

FLASH: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

MIN_SHORT_BACKWARD_TOKENS = 192
"""Number of queries from which the backward kernel is faster in 16 bits. With fewer queries it takes up to 8 times as
long as in float32, including conversions (torch 2.13, a CPU with AMX)."""


def merged_attention(layout: SharedPrefixLayout, scale: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention function (query, key, value) -> [N, H, D] for all layers of one row."""
    row = _Row.of(layout)

    def attend(query_NHD: Tensor, key_NJD: Tensor, value_NJD: Tensor) -> Tensor:
        out: Tensor = MergedAttention.apply(query_NHD, key_NJD, value_NJD, row, scale)  # type: ignore[no-untyped-call]
        return out

    return attend


@dataclass(frozen=True, slots=True)
class _Block:
    """Indices of a block's tokens in the row."""

    index_PGT: Tensor
    padding_X: Tensor
    """Indices of the padding in the flattened index."""

    @staticmethod
    def of(index_PGT: Tensor, valid_PGT: Tensor) -> _Block:
        return _Block(index_PGT, (~valid_PGT).flatten().nonzero()[:, 0])

    def gather(self, x_NHD: Tensor, key_heads: int) -> Tensor:
        """Block [P, J, G, Q, T, D] of the tokens of a row."""
        return self._split(x_NHD.index_select(0, self.index_PGT.flatten()), key_heads)

    def gather_gradient(self, gradient_NHD: Tensor, key_heads: int) -> Tensor:
        """Block of the gradients of a row, 0 at padding."""
        gathered = gradient_NHD.index_select(0, self.index_PGT.flatten())
        return self._split(gathered.index_fill_(0, self.padding_X, 0.0), key_heads)

    def _split(self, gathered_XHD: Tensor, key_heads: int) -> Tensor:
        split = gathered_XHD.view(*self.index_PGT.shape, key_heads, -1, gathered_XHD.shape[-1])
        return split.permute(0, 3, 1, 4, 2, 5).contiguous()


@dataclass(frozen=True, slots=True)
class _Row:
    """The two blocks of a row, shared by all layers."""

    prompts: _Block
    completions: _Block
    has_completions: bool
    mask_P11L: Tensor | None
    """Additive mask that hides padding of prompts; None if all prompts have the same length."""
    return_index_N: Tensor

    @staticmethod
    def of(layout: SharedPrefixLayout) -> _Row:
        """The blocks of a row with this layout."""
        return _Row(
            _Block.of(layout.prompt_index_PL[:, None], layout.prompt_valid_PL),
            _Block.of(layout.completion_index_PGT, layout.completion_valid_PGT),
            layout.has_completions,
            _mask(layout),
            layout.return_index_N,
        )

    def scatter(self, blocks: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Row [N, H, D] of this type, from the block of prompts and the block of completions, if there is one."""
        tokens = [x.permute(0, 2, 4, 1, 3, 5) for x in blocks]
        lengths = [math.prod(x.shape[:3]) for x in tokens]
        heads, width = math.prod(tokens[0].shape[3:5]), tokens[0].shape[-1]
        # copied straight into one tensor: torch.cat of contiguous parts would copy them twice
        joined_XHD = torch.empty(sum(lengths), heads, width, dtype=dtype)
        for part, each in zip(joined_XHD.split(lengths), tokens, strict=True):
            part.view_as(each).copy_(each)
        return joined_XHD.index_select(0, self.return_index_N)


class MergedAttention(torch.autograd.Function):
    """Attention of a packed row with a hand-written gradient, which saves blocks instead of gathered keys."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, row: _Row, scale: float) -> Tensor:
        heads, inputs = key.shape[1], (query, key, value)
        prompt = _Causal(scale, *(row.prompts.gather(x, heads) for x in inputs))
        out, lse = prompt.forward()
        outs, saved = [out], [*prompt.tensors, out, lse]
        if row.has_completions:
            own = _Causal(scale, *(row.completions.gather(x, heads) for x in inputs))
            # the queries of all completions of a prompt form one sequence, so the kernel reads the prompt's keys once
            to_prompt = _ToPrompt(scale, own.query, prompt.key, prompt.value, row.mask_P11L)
            out, lse = _merge(to_prompt.forward(), own.forward())
            outs.append(out)
            saved += [*own.tensors, out, lse]
        ctx.save_for_backward(*saved)
        ctx.row, ctx.scale = row, scale
        return row.scatter(outs, query.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        row: _Row = ctx.row
        query, key, value, out, lse, *of_completions = ctx.saved_tensors
        heads, gradient_NHD = key.shape[1], gradients[0]
        gradient = row.prompts.gather_gradient(gradient_NHD, heads)
        prompt = _Causal(ctx.scale, query, key, value).backward(gradient, out, lse)
        blocks = [prompt]
        if of_completions:
            query, own_key, own_value, out, lse = of_completions
            gradient = row.completions.gather_gradient(gradient_NHD, heads)
            # a backward kernel recomputes exp(score - lse): given the merged output and lse instead of its own part's,
            # it returns this part's term of the whole gradient
            own = _Causal(ctx.scale, query, own_key, own_value).backward(gradient, out, lse)
            to_prompt = _ToPrompt(ctx.scale, query, key, value, row.mask_P11L).backward(gradient, out, lse)
            own[0].add_(to_prompt[0])
            # keys and values of a prompt have gradients from the prompt itself and from all completions
            prompt[1].add_(to_prompt[1])
            prompt[2].add_(to_prompt[2])
            blocks.append(own)
        of_query, of_key, of_value = (row.scatter(each, gradient_NHD.dtype) for each in zip(*blocks, strict=True))
        return of_query, of_key, of_value, None, None


Triple = tuple[Tensor, Tensor, Tensor]
"""Query, key and value blocks, or their gradients."""


@dataclass(frozen=True, slots=True)
class _Causal:
    """Causal attention within each prompt or each completion."""

    scale: float
    query: Tensor
    key: Tensor
    value: Tensor

    @property
    def tensors(self) -> Triple:
        """The three blocks, to save for the backward pass."""
        return self.query, self.key, self.value

    def forward(self) -> tuple[Tensor, Tensor]:
        """Output [P, J, G, Q, T, D] and log-sum-exp [P, J, G, Q, T]."""
        out, lse = FLASH(*self._inputs(), 0.0, True, scale=self.scale)
        return out.view_as(self.query), lse.unflatten(0, self.query.shape[:3])

    def backward(self, gradient: Tensor, out: Tensor, lse: Tensor) -> Triple:
        """Gradients of the blocks, in the kernel's type."""
        gradient, out, query, key, value = _widened(self.query.shape[4], gradient, out, *self.tensors)
        row = _Causal(self.scale, query, key, value)._inputs()
        gradient, out, lse = (x.flatten(0, 2) for x in (gradient, out, lse))
        of_query, of_key, of_value = FLASH_BACKWARD(gradient, *row, out, lse, 0.0, True, scale=self.scale)
        split = self.query.shape[:3]
        return (
            of_query.unflatten(0, split),
            # grouped-query attention: all query heads of a group read one key head
            of_key.sum(1, keepdim=True).unflatten(0, split),
            of_value.sum(1, keepdim=True).unflatten(0, split),
        )

    def _inputs(self) -> Triple:
        """Queries, keys and values as [P J G, Q, T, D]; keys and values are repeated as views, without a copy."""
        times = self.query.shape[3]
        return (
            self.query.flatten(0, 2),
            self.key.flatten(0, 2).expand(-1, times, -1, -1),
            self.value.flatten(0, 2).expand(-1, times, -1, -1),
        )


@dataclass(frozen=True, slots=True)
class _ToPrompt:
    """Attention of completion tokens to all tokens of their prompt."""

    scale: float
    query: Tensor
    """Queries of the completions."""
    key: Tensor
    """Keys of the prompts."""
    value: Tensor
    mask_P11L: Tensor | None

    def forward(self) -> tuple[Tensor, Tensor]:
        """Output [P, J, G, Q, T, D] and log-sum-exp [P, J, G, Q, T]."""
        out, lse = FLASH(*self._inputs(), 0.0, False, attn_mask=self._mask_like_queries(), scale=self.scale)
        split = self.query.shape[2:5]
        return out.unflatten(2, split), lse.unflatten(2, split)

    def backward(self, gradient: Tensor, out: Tensor, lse: Tensor) -> Triple:
        """Gradients of the blocks, in the kernel's type."""
        num_queries = math.prod(self.query.shape[2:5])
        gradient, out, query, key, value = _widened(num_queries, gradient, out, self.query, self.key, self.value)
        wide = _ToPrompt(self.scale, query, key, value, self.mask_P11L)
        gradient, out, lse = (x.flatten(2, 4) for x in (gradient, out, lse))
        of_query, of_key, of_value = FLASH_BACKWARD(
            gradient, *wide._inputs(), out, lse, 0.0, False, attn_mask=wide._mask_like_queries(), scale=self.scale
        )
        return of_query.unflatten(2, self.query.shape[2:5]), of_key.view_as(self.key), of_value.view_as(self.value)

    def _inputs(self) -> Triple:
        """Queries [P, J, G Q T, D], keys and values [P, J, L, D]."""
        return self.query.flatten(2, 4), self.key[:, :, 0, 0], self.value[:, :, 0, 0]

    def _mask_like_queries(self) -> Tensor | None:
        return None if self.mask_P11L is None else self.mask_P11L.to(self.query.dtype)


def _widened(num_queries: int, *blocks: Tensor) -> list[Tensor]:
    """The blocks in the type in which the backward kernel is fastest for this number of queries."""
    is_short = blocks[0].dtype.itemsize < torch.float32.itemsize and num_queries < MIN_SHORT_BACKWARD_TOKENS
    return [x.float() for x in blocks] if is_short else list(blocks)


def _merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a softmax over two sets of keys, from those over each set."""
    (out_1, lse_1), (out_2, lse_2) = first, second
    lse = torch.logaddexp(lse_1, lse_2)
    # the weights exp(l1 - l) and exp(l2 - l) add up to 1, so the merge is one lerp
    merged = torch.empty(out_1.shape, dtype=out_1.dtype)
    torch.lerp(out_2, out_1, (lse_1 - lse).exp_().to(out_1.dtype)[..., None], out=merged)
    return merged, lse


def _mask(layout: SharedPrefixLayout) -> Tensor | None:
    """Additive mask [P, 1, 1, L] that hides padding of prompts; None if all prompts have the same length."""
    if bool(layout.prompt_valid_PL.all()):
        return None
    hidden = torch.zeros(layout.prompt_valid_PL.shape)
    return hidden.masked_fill_(~layout.prompt_valid_PL, -torch.inf)[:, None, None]
