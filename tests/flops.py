"""Counts of floating point operations that torch's counter lacks."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def products(_sum: Sequence[int], left: Sequence[int], right: Sequence[int], **_: object) -> int:
    return 2 * left[0] * left[1] * right[1]


def scores_and_sums(query: Sequence[int], key: Sequence[int], *_: object, **__: object) -> int:
    batch, heads, queries, width = query
    return 2 * 2 * batch * heads * queries * key[2] * width


def their_gradients(_gradient: object, query: Sequence[int], key: Sequence[int], *_: object, **__: object) -> int:
    return 2 * scores_and_sums(query, key)


NOT_COUNTED_BY_TORCH = {
    torch.ops.aten.addmm_: products,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: scores_and_sums,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: their_gradients,
}
"""Operators that it has no formula for."""
