"""Performance settings of the embedded engine, with defaults for each device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fovea.models.decoder import DecoderShape, decoder_shape
from fovea.models.shared_prefix.attention import heads_of
from fovea.models.vlm import VLM
from fovea.rollout.embedded.batch import Forward
from fovea.rollout.embedded.cache import Cache
from fovea.rollout.embedded.decode_step import CudaCapture, GraphStepper, Stepper, rerun
from fovea.rollout.embedded.dense_cache import DenseCache
from fovea.rollout.embedded.linears import TextWeights, can_use_onednn
from fovea.rollout.embedded.paged_attention import TRIALS, paged_attention, paged_refusal
from fovea.rollout.embedded.paged_cache import PagedCache, gathered_attention
from fovea.rollout.embedded.prefill import PASS_TOKENS

CacheKind = Literal["dense", "paged"]

CUDA_DECODE_STEPS_PER_WAIT = 8
"""Each wait stops the host until the device is done. Between two waits, finished rows keep decoding for nothing, on
average for half of this interval."""


@dataclass(frozen=True, slots=True)
class OneDnnLimits:
    """Limits within which oneDNN's layout is faster; with more rows or narrower layers, its blocks do not help."""

    max_rows: int
    min_width: int

    def allow(self, rows: int, width: int) -> bool:
        """True if a model of this width decodes this many rows faster."""
        return rows <= self.max_rows and width >= self.min_width


ONEDNN_LIMITS = {torch.float32: OneDnnLimits(64, 256), torch.bfloat16: OneDnnLimits(256, 128)}
"""Limits by dtype: bfloat16 products are so fast (AMX) that reading the weights bounds them up to more rows."""

PAGE_TOKENS = 32
"""Default page size; on average, half a page of each row is empty."""

INT8 = "(int8 decoding)"
"""Suffix of the engine's name if decode steps are approximate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Performance settings; only `int8_decoding` changes results."""

    cache: CacheKind | None = None
    """Kind of KV cache; None: paged if the kernel passes its trial, else dense."""
    page_tokens: int = PAGE_TOKENS
    """Page size of the paged cache."""
    decode_steps_per_wait: int | None = None
    """Decode steps between checks for finished rows. None: 8 on CUDA, 1 on CPUs, where checks are free."""
    pass_tokens: int = PASS_TOKENS
    """Prompt tokens in one forward pass of the prefill."""
    int8_decoding: bool = False
    """True to decode with 8-bit copies of the weights if all requests allow it; the prefill stays exact."""
    onednn_decoding: bool = True
    """True to decode with copies of the weights in oneDNN's layout if that is faster (`uses_onednn`)."""

    @property
    def keeps_outputs_in_order(self) -> bool:
        """True if every token is run once, in order, with exact weights, as a tape of linear outputs requires."""
        return not self.int8_decoding and self.cache != "paged" and self.decode_steps_per_wait in (None, 1)

    def uses_onednn(self, rows: int, embed: Tensor) -> bool:
        """True if decode copies in oneDNN's layout are faster for this many rows."""
        if not self.onednn_decoding or not can_use_onednn(embed):
            return False
        return ONEDNN_LIMITS[embed.dtype].allow(rows, embed.shape[1])

    def decode_steps_on(self, device: torch.device) -> int:
        """Number of decode steps between waits on this device."""
        return self.decode_steps_per_wait or (CUDA_DECODE_STEPS_PER_WAIT if device.type == "cuda" else 1)


def uses_pages(tuning: Tuning, shape: DecoderShape, device: torch.device, dtype: torch.dtype) -> bool:
    """True if the KV cache is paged: `tuning` says so or the kernel passes its trial; never with delta nets."""
    if shape.delta is not None:
        return False
    if tuning.cache is not None:
        return tuning.cache == "paged"
    return _paged_refusal(shape, device, dtype, tuning.page_tokens) is None


def make_cache(tuning: Tuning, shape: DecoderShape, like: Tensor, *, num_tokens: int) -> Cache:
    """Make a KV cache with the dtype and device of `like`; without a kernel, a paged one gathers its pages."""
    if not uses_pages(tuning, shape, like.device, like.dtype):
        return DenseCache(shape, like, num_tokens=num_tokens)
    has_kernel = _paged_refusal(shape, like.device, like.dtype, tuning.page_tokens) is None
    kernel = paged_attention if has_kernel else gathered_attention
    return PagedCache(shape, like, kernel, num_tokens=num_tokens, page_tokens=tuning.page_tokens)


def decoding_note(text_config: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Note for the start of a run on a GPU: the default decoding method, and its cost if it is slow."""
    refusal = _paged_refusal(decoder_shape(text_config), device, dtype, PAGE_TOKENS)
    if refusal is None:
        rows, most = TRIALS[-1]
        return f"decoding: paged attention by a Triton kernel (tried on {rows} rows of {most} keys), CUDA graphs"
    return (
        f"slow: decoding: the paged attention kernel is not used ({refusal}); the engine decodes with a dense KV cache "
        "and without CUDA graphs, which is three to six times slower; report this with the output of `fovea doctor`, "
        "or use rollout.engine=vllm"
    )


def _paged_refusal(shape: DecoderShape, device: torch.device, dtype: torch.dtype, page_tokens: int) -> str | None:
    if device.type == "cpu":
        return "there is no kernel for CPUs"
    if shape.delta is not None:
        return "delta nets need the dense KV cache"
    return paged_refusal(heads_of(shape, device, dtype), page_tokens)


def make_stepper(vlm: VLM, weights: TextWeights, shape: DecoderShape, cache: Cache) -> Forward:
    """Make the stepper for a cache: CUDA graphs for the paged cache, else eager."""
    eager = Stepper(vlm, weights, shape, cache)
    # graphs need fixed addresses, which only the paged cache has
    if isinstance(cache, PagedCache):
        return GraphStepper(eager, cache, vlm.banned_K, CudaCapture() if weights.embed.is_cuda else rerun)
    return eager
