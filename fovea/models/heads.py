"""Turns the query, key and value projections of a layer into heads: RMSNorm of query and key heads, rotary positions.

Axes: `N` tokens, `H` query heads, `J` key heads, `X` heads of any kind, `D` width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fovea.models.kernels import ReadSaved, RmsNormFunction, gradients_of_norm, inverse_rms, rms_norm
from fovea.models.rope import Rope, gradient_of_rotated, rotate, rotated

Triple = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values."""
RotateFunction = Callable[[Tensor, Tensor, Rope], tuple[Tensor, Tensor]]
"""(queries [N, H, D], keys [N, J, D], positions) -> rotated queries and keys"""


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Weights of the RMSNorm of each query head and of each key head (Qwen3)."""

    query_D: Tensor
    key_D: Tensor
    epsilon: float


class Heads(Protocol):
    """Norm and rotary positions of the heads of a row."""

    def __call__(
        self,
        projections: Triple,
        width: int,
        norm: HeadNorm | None,
        rope: Rope,
        saved: Sequence[ReadSaved] | None = None,
    ) -> Triple:
        """Queries [N, H, D], keys [N, J, D] and values [N, J, D] from projections [N, H D], [N, J D] and [N, J D]."""
        ...


def heads(
    projections: Triple, width: int, norm: HeadNorm | None, rope: Rope, saved: Sequence[ReadSaved] | None = None
) -> Triple:
    """Heads with norm and rotary positions applied; heads with readers in `saved` are not kept for a backward pass."""
    # without a norm there is nothing to read again: the backward pass of a rotation does not need its inputs
    if saved is None or norm is None or not torch.is_grad_enabled():
        return unfused_heads(projections, width, norm, rope)
    query, key, value = (x.unflatten(-1, (-1, width)) for x in projections)
    return (
        NormAndRotate.apply(query, norm.query_D, norm.epsilon, rope, saved[0]),  # type: ignore[no-untyped-call]
        NormAndRotate.apply(key, norm.key_D, norm.epsilon, rope, saved[1]),  # type: ignore[no-untyped-call]
        value,
    )


def unfused_heads(
    projections: Triple,
    width: int,
    norm: HeadNorm | None,
    rope: Rope,
    *,
    norm_kernel: RmsNormFunction = rms_norm,
    rotate_kernel: RotateFunction = rotate,
) -> Triple:
    """`heads` with separate functions for norm and rotation, each of which saves what its backward pass needs."""
    query, key, value = (x.unflatten(-1, (-1, width)) for x in projections)
    if norm is not None:
        query = norm_kernel(query, norm.query_D, norm.epsilon)
        key = norm_kernel(key, norm.key_D, norm.epsilon)
    return *rotate_kernel(query, key, rope), value


class NormAndRotate(torch.autograd.Function):
    """`kernels.RmsNorm`, then `rope.Rotate`, for heads that can be read again: saves one number per head."""

    @staticmethod
    def forward(ctx: Any, x_NXD: Tensor, weight_D: Tensor, epsilon: float, rope: Rope, read: ReadSaved) -> Tensor:
        x_float = x_NXD.float()
        scale = inverse_rms(x_float, epsilon)
        ctx.save_for_backward(weight_D, scale)
        ctx.rope, ctx.read = rope, read
        normed = weight_D * (x_float * scale).to(x_NXD.dtype)
        return rotated(normed, rope.cos_ND, rope.signed_sin_ND)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight_D, scale = ctx.saved_tensors
        gradient = gradient_of_rotated(gradients[0], ctx.rope.cos_ND, ctx.rope.signed_sin_ND)
        normalised = ctx.read().view_as(gradient).float() * scale
        trained = ctx.needs_input_grad[1]
        return *gradients_of_norm(gradient, normalised, weight_D, scale, of_weight=trained), None, None, None


class ValueHead(nn.Module):
    """A float32 linear layer on the hidden states that predict the actions, initialised to 0."""

    def __init__(self, width: int, *, detach_trunk: bool) -> None:
        """With `detach_trunk`, the value loss trains only this layer."""
        super().__init__()
        self._detach_trunk = detach_trunk
        self.linear = nn.Linear(width, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_AE: Tensor) -> Tensor:
        """Values [A]."""
        states_AE = hidden_AE.detach() if self._detach_trunk else hidden_AE
        values_A1: Tensor = self.linear(states_AE.float())
        # a copy, not a view: FSDP2 registers its backward hook on the tensor that a module returns
        return values_A1[:, 0].clone()
