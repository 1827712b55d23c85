"""Checks of the attention kernels: values and gradients beside torch's own attention on the CPU, and their rates.

Axes: `N` tokens of a packed row, `B` rows of a decode batch, `H` query heads, `J` key heads, `D` width of a head, `S`
tokens of a page, `X` pages of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from fovea.models.shared_prefix.attention_cuda import SharedVarlen
from fovea.models.shared_prefix.layout import SharedPrefixLayout, shared_prefix_layout
from fovea.models.varlen import HeadShape, flash_refusal, varlen_refusal
from fovea.rollout.embedded.paged_attention import paged_attention, paged_refusal
from fovea.rollout.embedded.paged_cache import PagedKernel, gathered_attention
from fovea.rollout.embedded.tuning import PAGE_TOKENS
from fovea.tools.probe.rates import CheckFailed, Rates, best_seconds

Heads = tuple[int, int, int]
"""Query heads, key heads, and the width of a head."""
LANGUAGE_HEADS: Mapping[str, Heads] = {
    "Qwen3-VL-2B": (16, 8, 128),
    "Qwen2.5-VL-3B": (16, 2, 128),
    "Qwen2.5-VL-7B": (28, 4, 128),
    "Qwen3-VL-8B": (32, 8, 128),
}
VISION_HEADS: Mapping[str, Heads] = {
    "Qwen3-VL-2B's tower": (16, 16, 64),
    "Qwen3-VL-8B's tower": (16, 16, 72),
    "Qwen2.5-VL's tower": (16, 16, 80),
}
PROMPTS, COMPLETIONS = (356, 300, 17), ((512, 3, 200, 1), (50, 50, 50), (9,))
"""Tokens of the packed row: shared prompts, completions beyond 256 tokens, and completions of a few."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest norm of a difference over that of the values."""
DECODED_ROWS, DECODED_KEYS = 256, 1024
TRIED_ON_CPU = (4, 64)
"""Rows and keys of a decode step that shows that these lines run."""


def packed_rows(device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """Forward and backward pass of the update's attention, beside torch's attention of each completion on the CPU."""
    layout = shared_prefix_layout(PROMPTS, COMPLETIONS)
    for name, heads in LANGUAGE_HEADS.items():
        shape = HeadShape(device, dtype, *heads)
        refusal = None if device.type == "cpu" else flash_refusal(shape)
        if refusal is not None:
            raise CheckFailed(f"{name}: refused: {refusal}")
        found = packed_differences(layout, shape)
        differences = ", ".join(f"{what} {value:.1e}" for what, value in found.items())
        if not max(found.values()) <= TOLERANCE[dtype]:
            raise CheckFailed(f"{name}: off by {differences}, and rounding moves them by less than {TOLERANCE[dtype]}")
        yield f"{name}: right; relative differences: {differences}"


def packed_differences(layout: SharedPrefixLayout, shape: HeadShape) -> dict[str, float]:
    """Relative differences of output and gradients between `SharedVarlen` on a device and plain attention."""
    random = torch.Generator().manual_seed(0)
    tokens = sum(prompt + sum(completions) for prompt, completions in layout.lengths)
    counts = (shape.heads, shape.key_heads, shape.key_heads, shape.heads)
    *inputs, gradient = (
        torch.randn(tokens, heads, shape.width, generator=random).to(shape.dtype).float() for heads in counts
    )
    attention = SharedVarlen.of(layout.to(shape.device), shape.width**-0.5)
    leaves = [x.to(shape.device, shape.dtype, copy=True).requires_grad_() for x in inputs]
    out = attention(*leaves)
    out.backward(gradient.to(out))
    plain_leaves = [x.requires_grad_() for x in inputs]
    plain = plain_attention(layout, *plain_leaves)
    plain.backward(gradient)
    found = [out.detach(), *(_gradient(x) for x in leaves)]
    expected = [plain.detach(), *(_gradient(x) for x in plain_leaves)]
    names = ("output", "of queries", "of keys", "of values")
    return {name: _relative(a, b) for name, a, b in zip(names, found, expected, strict=True)}


def plain_attention(layout: SharedPrefixLayout, query_NHD: Tensor, key_NJD: Tensor, value_NJD: Tensor) -> Tensor:
    """Attention of every prompt, and of every completion behind its prompt, one after the other."""
    outs, start = [], 0
    for prompt, completions in layout.lengths:
        of_prompt = torch.arange(start, start + prompt)
        outs.append(_causal(query_NHD, key_NJD, value_NJD, of_prompt))
        start += prompt
        for completion in completions:
            both = torch.cat([of_prompt, torch.arange(start, start + completion)])
            outs.append(_causal(query_NHD, key_NJD, value_NJD, both)[prompt:])
            start += completion
    return torch.cat(outs)


def _causal(query_NHD: Tensor, key_NJD: Tensor, value_NJD: Tensor, tokens: Tensor) -> Tensor:
    query, key, value = (x[tokens].transpose(0, 1)[None] for x in (query_NHD, key_NJD, value_NJD))
    out: Tensor = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


def _gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found.cpu().float() - expected).norm() / expected.norm())


def vision_rows(device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """Attention of the vision towers, for each width of their heads."""
    for name, heads in VISION_HEADS.items():
        if device.type == "cpu":
            yield f"{name}: not tried, there is no kernel for CPUs"
            continue
        refusal = varlen_refusal(HeadShape(device, dtype, *heads))
        if refusal is not None:
            raise CheckFailed(f"{name}: refused, and images are encoded by a slower kernel: {refusal}")
        yield f"{name}: right"


def decoding(device: torch.device, dtype: torch.dtype, rates: Rates) -> Iterator[str]:
    """Attention of decode steps: its values beside the plain twin's, and its rate beside that of reading memory."""
    for name, heads in LANGUAGE_HEADS.items():
        shape = HeadShape(device, dtype, *heads)
        if device.type == "cpu":
            rate = decode_rate(gathered_attention, shape, *TRIED_ON_CPU)
            yield f"{name}: no kernel for CPUs; its plain twin reads {rate / 1e9:,.1f} GB/s"
            continue
        refusal = paged_refusal(shape, PAGE_TOKENS)
        if refusal is not None:
            raise CheckFailed(f"{name}: {refusal}")
        rate = decode_rate(paged_attention, shape, DECODED_ROWS, DECODED_KEYS)
        yield (
            f"{name}: right; {DECODED_ROWS} rows of {DECODED_KEYS} keys: {rate / 1e9:,.0f} GB/s, "
            f"{rate / rates.read:.0%} of reading"
        )


def decode_rate(kernel: PagedKernel, shape: HeadShape, rows: int, keys: int) -> float:
    """Bytes of keys and values that a kernel reads in a second."""
    wide = -(-keys // PAGE_TOKENS)
    size = (1 + rows * wide, PAGE_TOKENS, shape.key_heads, shape.width)
    stored_keys, stored_values = (torch.randn(size, device=shape.device, dtype=shape.dtype) for _ in range(2))
    table_BX = (1 + torch.randperm(rows * wide, device=shape.device)).view(rows, wide).int()
    used_B = torch.full((rows,), keys, dtype=torch.int32, device=shape.device)
    query_BHD = torch.randn(rows, shape.heads, shape.width, device=shape.device, dtype=shape.dtype)
    seconds = best_seconds(
        lambda: kernel(query_BHD, stored_keys, stored_values, table_BX, used_B, shape.width**-0.5),
        str(shape.device.type),
    )
    return 2 * rows * keys * shape.key_heads * shape.width * shape.dtype.itemsize / seconds
