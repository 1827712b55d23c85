"""Linear layers of decoding in 8 bits, on CPU: a third of the time, and a distribution that differs a little.

Weights are rounded per output, activations per token, both to 127 steps of their largest magnitude (Dettmers et al.,
arXiv 2208.07339, section 2.1). Rounding the weights alone would be closer, but torch has no fast kernel for that in
float32.

Axes: `B` tokens in flight, `E` input width, `O` output widths together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

STEPS = 127


class Int8Linears:
    """Linear layers on the same input, from the (weight, bias) of each."""

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        weight_OE = torch.cat([weight for weight, _ in layers])
        self._widths = [len(weight) for weight, _ in layers]
        self._weight_OE, self._scale_O = _rounded(weight_OE)
        biases = [bias for _, bias in layers if bias is not None]
        assert len(biases) in (0, len(layers)), "some of the joined layers have a bias and some have none"
        self._bias_O = torch.cat(biases) if biases else None

    def __call__(self, x_BE: Tensor) -> tuple[Tensor, ...]:
        x_int8_BE, scale_B = _rounded(x_BE)
        out_BO = torch._int_mm(x_int8_BE, self._weight_OE.t()).to(x_BE.dtype)
        out_BO.mul_(scale_B[:, None]).mul_(self._scale_O)
        if self._bias_O is not None:
            out_BO.add_(self._bias_O)
        outs: tuple[Tensor, ...] = out_BO.split(self._widths, dim=1)
        return outs


def _rounded(x_XE: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in 8 bits, and what to multiply each by."""
    scale_X = x_XE.abs().amax(dim=1).clamp_(min=torch.finfo(x_XE.dtype).tiny) / STEPS
    return (x_XE / scale_X[:, None]).round_().to(torch.int8), scale_X
