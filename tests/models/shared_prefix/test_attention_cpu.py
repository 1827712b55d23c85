"""Shared-prefix attention on CPU in bfloat16: gradients against plain attention in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fovea.models.shared_prefix.attention import RowAttention, gathered_attention
from fovea.models.shared_prefix.attention_cpu import MIN_SHORT_BACKWARD_TOKENS, merged_attention
from fovea.models.shared_prefix.layout import SharedPrefixLayout, shared_prefix_layout
from fovea.models.vision.attention import eager_attention

HEADS, KEY_HEADS, WIDTH = 4, 2, 32
SCALE = WIDTH**-0.5
ROUNDING = 0.01
"""Of the largest gradient: bfloat16 has 8 bits, and the gradients are sums of rounded terms."""


def gradients(attend: RowAttention, row: list[Tensor], of_output: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in row]
    (attend(*leaves) * of_output).sum().backward()
    return [x.grad for x in leaves if x.grad is not None]


def random_row(layout: SharedPrefixLayout) -> tuple[list[Tensor], Tensor]:
    """Query, key and value of a row, and a gradient of the output, in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(len(layout.return_index_N), heads, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    *row, of_output = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    return row, of_output


@pytest.mark.parametrize(
    "completions", [((5, 17), (9,)), ((MIN_SHORT_BACKWARD_TOKENS, 3), (8,))], ids=["short", "long"]
)
def test_bfloat16_gradients_are_off_by_no_more_than_their_rounding(completions: tuple[tuple[int, ...], ...]) -> None:
    layout = shared_prefix_layout([20, 33], completions)
    row, of_output = random_row(layout)
    found = gradients(merged_attention(layout, SCALE), row, of_output)
    plain = gathered_attention(eager_attention, layout, SCALE)
    expected = gradients(plain, [x.double() for x in row], of_output.double())
    for mine, exact in zip(found, expected, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.double() - exact).abs().max() < ROUNDING * exact.abs().max()
