"""Prompts cut into forward passes, so that what a pass holds does not grow with the prompts that are admitted.

Axes: `N` tokens of a pass, `H` query heads, `J` key heads, `L` tokens of a prompt up to here, `D` width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fovea.models.decoder import Attend
from fovea.models.shared_prefix.attention import causal_prompts
from fovea.models.shared_prefix.layout import shared_prefix_layout
from fovea.rollout.embedded.cache import Cache, Span

PASS_TOKENS = 16_384
"""Enough to keep any device busy; at a width of 8192 one pass then holds 256 MiB per tensor of activations in bf16."""


def prompt_passes(lengths: Sequence[int], first: int, pass_tokens: int) -> list[list[Span]]:
    """Whole prompts share a pass while they fit; a longer one goes through alone, a piece at a time."""
    passes: list[list[Span]] = []
    room = 0
    for prompt, length in enumerate(lengths, start=first):
        if length > pass_tokens:
            starts = range(0, length, pass_tokens)
            passes += [[Span(prompt=prompt, start=a, end=min(a + pass_tokens, length))] for a in starts]
            room = 0
            continue
        if length > room:
            passes.append([])
            room = pass_tokens
        passes[-1].append(Span(prompt=prompt, start=0, end=length))
        room -= length
    return passes


def prompt_attention(spans: Sequence[Span], whole: bool, cache: Cache, scale: float, device: torch.device) -> Attend:
    """Attention of one pass, which stores keys and values as it goes; `whole`: these are whole prompts."""
    store = cache.writer(spans)
    layout = shared_prefix_layout([span.end - span.start for span in spans], [[] for _ in spans]).to(device)

    def packed(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        store(layer, key, value)
        return causal_prompts(query, key, value, layout, scale)

    def piece(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        store(layer, key, value)
        return _causal_tail(query, *cache.prompt(layer, spans[0]), scale)

    return packed if whole else piece


def _causal_tail(query_NHD: Tensor, key_JLD: Tensor, value_JLD: Tensor, scale: float) -> Tensor:
    """The last N of L tokens look at themselves and all before."""
    times = query_NHD.shape[1] // len(key_JLD)
    key, value = (x.repeat_interleave(times, 0)[None] for x in (key_JLD, value_JLD))
    new, length = len(query_NHD), key.shape[2]
    mask = torch.ones(new, length, dtype=torch.bool, device=query_NHD.device).tril(length - new)
    out = F.scaled_dot_product_attention(query_NHD.transpose(0, 1)[None], key, value, attn_mask=mask, scale=scale)
    return out[0].transpose(0, 1)
