"""Rotary positions of queries and keys, with a hand-written gradient.

Axes: `N` tokens, `H` query heads, `J` key heads, `X` heads of any kind, `D` width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding (Su et al., arXiv 2104.09864) of N tokens, in the half-rotated layout of Qwen.

    [a, b] -> [a cos - b sin, b cos + a sin], or x cos + swapped(x) sin' where sin' is -sin in the first half. Tables
    narrower than a head rotate only its first channels.
    """

    cos_ND: Tensor
    sin_ND: Tensor
    signed_sin_ND: Tensor

    @staticmethod
    def of(cos_ND: Tensor, sin_ND: Tensor) -> Rope:
        """The embedding with these cosines and sines."""
        # the sign goes into the sine once per pass, instead of into a rotated copy of every query and key
        first, second = sin_ND.chunk(2, -1)
        return Rope(cos_ND, sin_ND, torch.cat([-first, second], dim=-1))

    def part(self, start: int, end: int) -> Rope:
        """The embedding of tokens `start` to `end`."""
        return Rope(self.cos_ND[start:end], self.sin_ND[start:end], self.signed_sin_ND[start:end])


def halves_of_pairs(x_NC: Tensor, head_dim: int, rotated: int) -> Tensor:
    """Heads in the half-rotated layout [N, C], from heads whose first `rotated` channels are neighbouring pairs."""
    x_NXD = x_NC.unflatten(-1, (-1, head_dim))
    pairs, rest = x_NXD[..., :rotated].unflatten(-1, (-1, 2)), x_NXD[..., rotated:]
    return torch.cat([pairs[..., 0], pairs[..., 1], rest], dim=-1).flatten(1)


def rotate(query_NHD: Tensor, key_NJD: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """Queries and keys with rotary positions applied."""
    if not torch.is_grad_enabled():
        return rotated(query_NHD, rope.cos_ND, rope.signed_sin_ND), rotated(key_NJD, rope.cos_ND, rope.signed_sin_ND)
    query: Tensor = Rotate.apply(query_NHD, rope.cos_ND, rope.signed_sin_ND)  # type: ignore[no-untyped-call]
    key: Tensor = Rotate.apply(key_NJD, rope.cos_ND, rope.signed_sin_ND)  # type: ignore[no-untyped-call]
    return query, key


class Rotate(torch.autograd.Function):
    """Applies `Rope`, with a hand-written gradient that saves no activations."""

    @staticmethod
    def forward(ctx: Any, x_NXD: Tensor, cos_ND: Tensor, signed_sin_ND: Tensor) -> Tensor:
        ctx.save_for_backward(cos_ND, signed_sin_ND)
        return rotated(x_NXD, cos_ND, signed_sin_ND)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradient_of_rotated(gradients[0], *ctx.saved_tensors), None, None


def rotated(x_NXD: Tensor, cos_ND: Tensor, signed_sin_ND: Tensor) -> Tensor:
    """x cos + swapped(x) sin', where swapped exchanges the halves of the last axis."""
    first, second = signed_sin_ND[:, None].chunk(2, -1)
    return _rotated_halves(x_NXD, cos_ND, first, second)


def gradient_of_rotated(gradient_NXD: Tensor, cos_ND: Tensor, signed_sin_ND: Tensor) -> Tensor:
    """Gradient of x in `rotated`: g cos + swapped(g sin')."""
    first, second = signed_sin_ND[:, None].chunk(2, -1)
    return _rotated_halves(gradient_NXD, cos_ND, second, first)


def _rotated_halves(x_NXD: Tensor, cos_ND: Tensor, first: Tensor, second: Tensor) -> Tensor:
    width = cos_ND.shape[-1]
    if width < x_NXD.shape[-1]:
        turned = _rotated_halves(x_NXD[..., :width], cos_ND, first, second)
        return torch.cat([turned, x_NXD[..., width:]], dim=-1)
    out_NXD = x_NXD * cos_ND[:, None]
    # views of the halves: a swapped copy would take another pass over memory
    (out_1, out_2), (x_1, x_2) = out_NXD.chunk(2, -1), x_NXD.chunk(2, -1)
    out_1.addcmul_(x_2, first)
    out_2.addcmul_(x_1, second)
    return out_NXD
