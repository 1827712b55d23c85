"""Linear layers of decoding on CPU with weights packed for few rows: the same products, a fifth faster.

For 32 rows a matrix product is bound by how the weights come through the caches; oneDNN takes them in blocks that are
laid out once per version of the weights. It costs a second copy of the decoder's weights.

Axes: `B` tokens in flight, `E` input width, `O` output widths together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fovea.models.activation_tape import TapeColumn

ONEDNN: Any = torch.ops.mkldnn
EXPECTED_ROWS = 32
"""What the layout is chosen for; any number works."""


def can_pack(like: Tensor) -> bool:
    """Whether this build of torch has oneDNN, and these weights a type that it packs here."""
    return torch.backends.mkldnn.is_available() and not like.is_cuda and like.dtype == torch.float32


class PackedLinears:
    """Linear layers on the same input, from the (weight, bias) of each, as one."""

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor | None]], column: TapeColumn | None) -> None:
        self._widths = [len(weight) for weight, _ in layers]
        weight_OE = torch.cat([weight for weight, _ in layers]) if len(layers) > 1 else layers[0][0]
        self._packed = ONEDNN._reorder_linear_weight(weight_OE, EXPECTED_ROWS)
        biases = [bias for _, bias in layers if bias is not None]
        assert len(biases) in (0, len(layers)), "some of the joined layers have a bias and some have none"
        self._bias_O = torch.cat(biases) if biases else None
        self._column = column

    def __call__(self, x_BE: Tensor) -> tuple[Tensor, ...]:
        out_BO: Tensor = ONEDNN._linear_pointwise(x_BE, self._packed, self._bias_O, "none", [], "")
        kept = self._column.rows(len(x_BE)) if self._column is not None else None
        if kept is not None:
            kept.copy_(out_BO)
        outs: tuple[Tensor, ...] = out_BO.split(self._widths, dim=1)
        return outs
