"""Performance settings of the embedded engine, with defaults by device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fovea.models.decoder import DecoderShape
from fovea.models.vlm import VLM
from fovea.rollout.embedded.cache import Cache
from fovea.rollout.embedded.decode_step import GraphStepper, Stepper, cuda_capture, rerun
from fovea.rollout.embedded.dense_cache import DenseCache
from fovea.rollout.embedded.linears import TextWeights, can_use_onednn
from fovea.rollout.embedded.paged_attention import usable, varlen_attention
from fovea.rollout.embedded.paged_cache import PagedCache, gathered_attention
from fovea.rollout.embedded.prefill import PASS_TOKENS

CacheKind = Literal["dense", "paged"]

CUDA_DECODE_STEPS_PER_SYNC = 8
"""Each sync makes the host wait for the device; on average a finished row decodes for half of this interval in vain."""

MAX_ONEDNN_ROWS, MIN_ONEDNN_WIDTH = 64, 256
"""Limits of the oneDNN layout: with more rows, or narrower layers, a product is not bound by reading the weights."""


INT8 = "(int8 decoding)"
"""Part of the engine's name where decode steps are inexact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Performance settings; only `int8_decoding` changes results."""

    cache: CacheKind | None = None
    """None: paged where PyTorch has a kernel for it, else dense."""
    page_tokens: int = 256
    """Page size of the paged cache; flash attention 2 requires 256, later ones take smaller pages."""
    decode_steps_per_sync: int | None = None
    """Decode steps between syncs to see which rows have finished. None: 8 on CUDA, 1 on CPUs, where a sync is free."""
    pass_tokens: int = PASS_TOKENS
    """Prompt tokens in one forward pass of prefill."""
    int8_decoding: bool = False
    """Decode steps use 8-bit decode copies where requests allow it; prefill stays exact."""
    onednn_decoding: bool = True
    """Decode steps use oneDNN decode copies where those are faster (`uses_onednn`)."""

    @property
    def keeps_outputs_in_order(self) -> bool:
        """Whether each token passes once, in order, through exact weights, as a tape of linear outputs requires."""
        return not self.int8_decoding and self.cache != "paged" and self.decode_steps_per_sync in (None, 1)

    def uses_onednn(self, rows: int, embed: Tensor) -> bool:
        """Whether oneDNN decode copies are faster for this many rows."""
        small = rows <= MAX_ONEDNN_ROWS and embed.shape[1] >= MIN_ONEDNN_WIDTH
        return self.onednn_decoding and small and can_use_onednn(embed)

    def decode_steps_on(self, device: torch.device) -> int:
        """Decode steps between syncs on this device."""
        return self.decode_steps_per_sync or (CUDA_DECODE_STEPS_PER_SYNC if device.type == "cuda" else 1)


def make_cache(tuning: Tuning, shape: DecoderShape, like: Tensor, *, num_tokens: int) -> Cache:
    """Make a cache with dtype and device of `like`; a paged cache without a kernel gathers its pages, for tests."""
    has_kernel = usable(shape, like, tuning.page_tokens)
    if tuning.cache == "dense" or (tuning.cache is None and not has_kernel):
        return DenseCache(shape, like)
    kernel = varlen_attention if has_kernel else gathered_attention
    return PagedCache(shape, like, kernel, num_tokens=num_tokens, page_tokens=tuning.page_tokens)


def make_stepper(vlm: VLM, weights: TextWeights, shape: DecoderShape, cache: Cache) -> Stepper:
    """Make the stepper that fits a cache: CUDA graphs for pages, else eager."""
    # graphs need the fixed addresses that only the paged cache has
    if isinstance(cache, PagedCache):
        capture = cuda_capture if weights.embed.is_cuda else rerun
        return GraphStepper(vlm, weights, shape, cache, capture)
    return Stepper(vlm, weights, shape, cache)
