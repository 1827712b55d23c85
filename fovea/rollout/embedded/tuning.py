"""Which cache and which way to run a step suit a device."""

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
"""Each look at what has finished makes the host wait for the device; an finished row runs on for half of this on average."""


MAX_ONEDNN_ROWS, MIN_ONEDNN_WIDTH = 64, 256
"""With more rows, or narrower layers that stay in the cache, a product is no longer bound by how weights are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How the engine does its work."""

    cache: CacheKind | None = None
    """None: pages where PyTorch has a kernel for them, else slots."""
    page_tokens: int = 256
    """What flash attention 2 asks for; later ones take smaller pages as well."""
    decode_steps_per_sync: int | None = None
    """Tokens between two looks at what has finished; None is 1 on a CPU, where a look costs nothing."""
    pass_tokens: int = PASS_TOKENS
    """Of prompts, in one forward pass."""
    int8_decoding: bool = False
    """The one setting that changes results: decoding steps in 8 bits (`int8`); prompts run as they are."""
    onednn_decoding: bool = True
    """Weights of decoding steps laid out for few rows where that pays (`packed`)."""

    @property
    def keeps_outputs_in_order(self) -> bool:
        """What a tape relies on: one pass per token, on places reserved before, by exact weights."""
        return not self.int8_decoding and self.cache != "paged" and self.decode_steps_per_sync in (None, 1)

    def uses_onednn(self, rows: int, embed: Tensor) -> bool:
        """Whether a second copy of the weights pays for so many rows."""
        small = rows <= MAX_ONEDNN_ROWS and embed.shape[1] >= MIN_ONEDNN_WIDTH
        return self.onednn_decoding and small and can_use_onednn(embed)

    def decode_steps_on(self, device: torch.device) -> int:
        return self.decode_steps_per_sync or (CUDA_DECODE_STEPS_PER_SYNC if device.type == "cuda" else 1)


def make_cache(tuning: Tuning, shape: DecoderShape, like: Tensor, *, num_tokens: int) -> Cache:
    """Of the type and on the device of `like`; pages without a kernel are gathered, for tests."""
    has_kernel = usable(shape, like, tuning.page_tokens)
    if tuning.cache == "dense" or (tuning.cache is None and not has_kernel):
        return DenseCache(shape, like)
    kernel = varlen_attention if has_kernel else gathered_attention
    return PagedCache(shape, like, kernel, num_tokens=num_tokens, page_tokens=tuning.page_tokens)


def make_stepper(vlm: VLM, weights: TextWeights, shape: DecoderShape, cache: Cache) -> Stepper:
    """Pages come with graphs, since both need memory that stays where it is."""
    if isinstance(cache, PagedCache):
        capture = cuda_capture if weights.embed.is_cuda else rerun
        return GraphStepper(vlm, weights, shape, cache, capture)
    return Stepper(vlm, weights, shape, cache)
