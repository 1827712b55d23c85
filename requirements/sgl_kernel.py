"""Stands in for SGLang's kernels on a CPU, in pure torch; for the environment of the tests alone.

SGLang's kernels (`sglang-kernel`) are built for GPUs and for CPUs with AMX. On other CPUs SGLang itself computes with
torch, but it imports this package, looks operators up by name, and needs the few that are written out here. So its
scheduler, caches, processors and weight updates are tested, and none of its kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
BITS_32 = 0xFFFFFFFF

LOOKED_UP = (
    "apply_rotary_pos_emb_cpu",
    "conv3d_embed_cpu",
    "flash_attn_varlen_func",
    "fused_gdn_gating_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_sigmoid_mul_cpu",
)
"""Operators that SGLang looks up when models are imported, and does not call for those of the tests without AMX."""


def murmur_hash32(seeds_B: Tensor, positions_B: Tensor, columns_V: Tensor) -> Tensor:
    """MurmurHash3 of seed (two words), position and column: uint32 [B, V]; the noise of a seeded draw."""
    # in int64, since torch lacks most operations on unsigned integers
    seeds_B = seeds_B.to(torch.int64)
    hash_B1 = torch.zeros_like(seeds_B).unsqueeze(1)
    for word_B in (seeds_B & BITS_32, (seeds_B >> 32) & BITS_32, positions_B.to(torch.int64) & BITS_32):
        hash_B1 = _mixed_in(hash_B1, word_B.unsqueeze(1))
    hash_BV = _mixed_in(hash_B1, columns_V.to(torch.int64).unsqueeze(0)) ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hash_BV = (hash_BV ^ (hash_BV >> shift)) * factor & BITS_32
    return (hash_BV ^ (hash_BV >> 16)).to(torch.uint32)


def _mixed_in(hashes: Tensor, words: Tensor) -> Tensor:
    words = _rotated(words * 0xCC9E2D51 & BITS_32, 15) * 0x1B873593 & BITS_32
    return _rotated(hashes ^ words, 13) * 5 + 0xE6546B64 & BITS_32


def _rotated(values: Tensor, bits: int) -> Tensor:
    return (values << bits | values >> (32 - bits)) & BITS_32


def assign_req_to_token_pool_cpu(
    rows_R: Tensor, pool: Tensor, starts_R: Tensor, ends_R: Tensor, slots_N: Tensor, *_: object
) -> None:
    """Write each request's new cache slots, which come one request after another, into its row of the pool."""
    taken = 0
    for row, start, end in zip(rows_R.tolist(), starts_R.tolist(), ends_R.tolist(), strict=True):
        pool[row, start:end] = slots_N[taken : taken + end - start]
        taken += end - start


def __getattr__(name: str) -> Callable[..., None]:
    """Any other kernel: it can be imported, and fails when it is called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in for CPUs")

    return missing


for name in LOOKED_UP:
    LIBRARY.define(f"{name}() -> ()")
LIBRARY.define("murmur_hash32_cpu(Tensor seeds, Tensor positions, Tensor columns) -> Tensor")
LIBRARY.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
