"""Liger's Triton kernels for CUDA: the only module that imports liger_kernel (extra: liger).

RMSNorm, SwiGLU and rotary positions, forward and backward, each in one kernel (Hsu et al., arXiv 2410.10989). They
are an alternative to `models.kernels`, with the same formulas. They have been compared with torch in Triton's
interpreter but not on a GPU yet; `tests/models/test_kernels_liger.py` does that on a machine with a GPU.

Axes: `B` batch, `H` query heads, `J` key heads, `N` tokens, `D` width.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fovea.models.decoder import Kernels
from fovea.models.heads import HeadNorm, Triple, unfused_heads
from fovea.models.kernels import ReadSaved
from fovea.models.rope import Rope
from fovea.models.rope import rotate as rotate_in_torch
from fovea.utils.installing import pip_install
from fovea_gym.errors import MissingExtraError

try:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction
except ModuleNotFoundError as error:
    raise MissingExtraError(
        "train.backend.liger_kernels is true, or auto with liger_kernel installed, but "
        f"{error.name} is not installed; {pip_install('liger')}, or set train.backend.liger_kernels=false"
    ) from error

AS_LLAMA = "llama"
"""Liger's casting mode that fits Qwen: the mean of squares in float32, the product with the weight in x's type."""


def rms_norm(x_ND: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """RMSNorm: w x / sqrt(mean(x^2) + epsilon) over the last axis; any number of axes before it."""
    # in_place=False: the gradient that the kernel would overwrite may also be that of the residual stream
    normalised: Tensor = LigerRMSNormFunction.apply(x_ND, weight_D, epsilon, 0.0, AS_LLAMA, False)
    return normalised


def silu_times(gate: Tensor, up: Tensor, saved: Sequence[ReadSaved] | None = None) -> Tensor:
    """SwiGLU: silu(gate) up, the activation of a gated MLP. The backward pass overwrites both inputs."""
    assert saved is None, "an activation tape on CUDA"
    product: Tensor = LigerSiLUMulFunction.apply(gate, up)
    return product


def rotate(query_BHND: Tensor, key_BJND: Tensor, cos_BND: Tensor, sin_BND: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys with rotary positions, in the half-rotated layout of transformers' `apply_rotary_pos_emb`.

    Overwrites inputs that are transposed views of [B, N, H, D]: no backward pass may need them.
    """
    query, key = LigerRopeFunction.apply(query_BHND, key_BJND, cos_BND, sin_BND)
    return query, key


def rotate_row(query_NHD: Tensor, key_NJD: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """`rotate` for a packed row; uses torch if tables are narrower than a head, since Liger rotates whole heads."""
    if rope.cos_ND.shape[-1] < query_NHD.shape[-1]:
        return rotate_in_torch(query_NHD, key_NJD, rope)
    query, key = rotate(
        query_NHD.transpose(0, 1)[None], key_NJD.transpose(0, 1)[None], rope.cos_ND[None], rope.sin_ND[None]
    )
    return query[0].transpose(0, 1), key[0].transpose(0, 1)


def heads(
    projections: Triple, width: int, norm: HeadNorm | None, rope: Rope, saved: Sequence[ReadSaved] | None = None
) -> Triple:
    """Heads with norm and rotary positions applied."""
    assert saved is None, "an activation tape on CUDA"
    if norm is None:
        # the rotation overwrites its inputs, and selective checkpointing keeps outputs of linear layers
        query, key, value = projections
        projections = (query.clone(), key.clone(), value)
    return unfused_heads(projections, width, norm, rope, norm_kernel=rms_norm, rotate_kernel=rotate_row)


LIGER_KERNELS = Kernels(norm=rms_norm, heads=heads, gate=silu_times)
