"""Chunked prefill: forward passes over packed prompts that fill the KV cache.

Axes: `P` prompts, `N` tokens of a packed row, `E` width of the model, `L` tokens of a prompt so far, `H` query heads,
`J` key heads, `D` width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fovea.models.decoder import Attend, DecoderShape, VisualResidual, decode
from fovea.models.flops import Work
from fovea.models.rope import Rope
from fovea.models.shared_prefix.attention import causal_prompts, fastest_kernel, heads_of
from fovea.models.shared_prefix.layout import shared_prefix_layout
from fovea.models.transfer import to_device
from fovea.models.varlen import Pairs, Segments, segment_attention_on
from fovea.models.vision.feature_cache import ImageFeatures, concatenate
from fovea.models.vlm import VLM
from fovea.rollout.embedded.cache import Cache, TokenSpan
from fovea.rollout.embedded.linears import TextWeights
from fovea.rollout.embedded.recorder import Recorder
from fovea.rollout.embedded.requests import KeptKeys, QueuedRequest
from fovea.types import Metrics

TERA = 1e12
PASS_TOKENS = 16_384
"""Tokens of a forward pass: enough to keep any device busy; at width 8192, a bf16 activation needs 256 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRow:
    """Packed prompts, as the input of the first decoder layer."""

    hidden_NE: Tensor
    rope: Rope
    visual: VisualResidual | None

    def part(self, start: int, end: int) -> PrefillRow:
        """Return the slice of tokens from `start` to `end`."""
        if (start, end) == (0, len(self.hidden_NE)):
            return self
        visual = self.visual
        if visual is not None:
            inside = (visual.tokens >= start) & (visual.tokens < end)
            visual = VisualResidual(tokens=visual.tokens[inside] - start, layers=[x[inside] for x in visual.layers])
        return PrefillRow(hidden_NE=self.hidden_NE[start:end], rope=self.rope.part(start, end), visual=visual)


def prefill(
    row: PrefillRow,
    weights: TextWeights,
    shape: DecoderShape,
    requests: Sequence[QueuedRequest],
    cache: Cache,
    recorder: Recorder,
    pass_tokens: int = PASS_TOKENS,
) -> Tensor:
    """Fill the cache with prompts; returns the hidden states [P, E] that predict the first tokens.

    If a prompt continues an earlier turn, only its new tokens are run.
    """
    lengths = [request.prompt.num_tokens for request in requests]
    starts = [request.first_new_token for request in requests]
    first, outs, places, start = cache.add(requests), [], [], 0
    # before any pass, since chunks attend to the kept tokens
    restore(cache, [(prompt, each.kept) for prompt, each in enumerate(requests, start=first) if each.kept is not None])
    if cache.states is not None:
        cache.states.begin([request.kept for request in requests])
    for spans in prompt_passes(lengths, first, pass_tokens, starts):
        part = row.part(start, start + sum(span.end - span.start for span in spans))
        # the spans of a pass are whole prompts, the new tokens of several prompts, or one chunk of a single prompt
        whole = spans[0].end - spans[0].start == lengths[spans[0].prompt - first]
        attend = prompt_attention(spans, whole, cache, shape, part.hidden_NE)
        scan = None if cache.states is None else cache.states.prefill(spans, first)
        with recorder.recording(len(part.hidden_NE)) as place:
            outs.append(decode(weights.decoder, shape, part.hidden_NE, part.rope, attend, part.visual, scan))
        places.append(place)
        start += len(part.hidden_NE)
    if cache.states is not None:
        cache.states.branch([request.n for request in requests])
    # recorded prompts are consecutive on the tape, across all passes
    recorder.prefilled(requests, places[0])
    # indices of the prompts' last tokens in the concatenated outputs of all passes
    last_P = (torch.tensor(lengths) - torch.tensor(starts)).cumsum(0) - 1
    return torch.cat(outs)[to_device(last_P, row.hidden_NE.device)]


def restore(cache: Cache, kept: Sequence[tuple[int, KeptKeys]]) -> None:
    """Write the kept KV caches of earlier turns to the beginnings of prompts in the cache, given by their indices."""
    if not kept:
        return
    store = cache.writer([TokenSpan(prompt=prompt, start=0, end=keys.num_tokens) for prompt, keys in kept])
    for layer, of_prompts in enumerate(zip(*(keys.layers for _, keys in kept), strict=True)):
        keys, values = torch.cat(of_prompts, dim=2).transpose(1, 2)
        store(layer, keys, values)


def prefill_row(
    vlm: VLM, weights: TextWeights, requests: Sequence[QueuedRequest], features: Sequence[ImageFeatures]
) -> PrefillRow:
    """Embed the new tokens of the prompts, with the `features` of new images in place of their pad tokens."""
    device = weights.embed.device
    ids_N = np.concatenate([request.prompt.token_ids_L[request.first_new_token :] for request in requests])
    token_ids_N = to_device(torch.from_numpy(ids_N), device)
    positions_3N = to_device(
        torch.from_numpy(
            np.concatenate([request.positions_3L[:, request.first_new_token :] for request in requests], axis=1)
        ),
        device,
    )
    hidden_NE = weights.embed[token_ids_N]
    visual = None
    if features:
        joined = concatenate(features)
        # found on the host, so that it need not wait for the device
        pads = to_device(torch.from_numpy(np.flatnonzero(ids_N == vlm.family.image_token_id)), device)
        hidden_NE = hidden_NE.index_copy(0, pads, joined.embeds_VD)
        visual = VisualResidual(tokens=pads, layers=joined.deepstack_VD)
    return PrefillRow(hidden_NE=hidden_NE, rope=vlm.rope(positions_3N, hidden_NE), visual=visual)


def prompt_passes(
    lengths: Sequence[int], first: int, pass_tokens: int, starts: Sequence[int] | None = None
) -> list[list[TokenSpan]]:
    """Split prompts into forward passes of at most `pass_tokens`, so that activations do not grow with the batch.

    Whole prompts share a pass as long as they fit, and so do the new tokens of prompts with a kept KV cache. A prompt
    with more new tokens runs by itself, in chunks. `starts` holds the first token to run of each prompt, by default 0.
    """
    passes: list[list[TokenSpan]] = []
    room, after_kept = 0, False
    for prompt, (length, start) in enumerate(zip(lengths, starts or [0] * len(lengths), strict=True), start=first):
        new = length - start
        if new > pass_tokens:
            chunks = range(start, length, pass_tokens)
            passes += [[TokenSpan(prompt=prompt, start=a, end=min(a + pass_tokens, length))] for a in chunks]
            room = 0
            continue
        # attention of whole prompts is packed, attention of new tokens reads the cache: a pass has only one kind
        if new > room or (start > 0) != after_kept:
            passes.append([])
            room, after_kept = pass_tokens, start > 0
        passes[-1].append(TokenSpan(prompt=prompt, start=start, end=length))
        room -= new
    return passes


def prompt_attention(
    spans: Sequence[TokenSpan], whole: bool, cache: Cache, shape: DecoderShape, like: Tensor
) -> Attend:
    """Attention of one pass, which also stores keys and values; `whole` says that the spans are whole prompts.

    `like` has the dtype and device of the pass.
    """
    store, scale, device = cache.writer(spans), shape.scale, like.device
    sizes, ends = [span.end - span.start for span in spans], [span.end for span in spans]
    if whole:
        layout = shared_prefix_layout(sizes, [[] for _ in spans]).to(device)

        def packed(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            store(layer, key, value)
            return causal_prompts(query, key, value, layout, scale)

        return packed
    # keys and values are read back from the cache, which also holds the earlier tokens
    load = cache.reader(spans)
    if fastest_kernel(heads_of(shape, device, like.dtype)) == "varlen":
        attention = segment_attention_on(device)
        pairs = Pairs(queries=Segments.of(sizes, device), keys=Segments.of(ends, device), causal=True, scale=scale)

        def in_one_call(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            store(layer, key, value)
            out, _ = attention.forward((query, *load(layer)), pairs)
            return out

        return in_one_call
    masks = [_tail_mask(size, end, device) for size, end in zip(sizes, ends, strict=True)]

    def one_by_one(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        store(layer, key, value)
        keys, values = (x.split(ends) for x in load(layer))
        tails = zip(query.split(sizes), keys, values, masks, strict=True)
        return torch.cat([_attention_of_tail(q, k, v, mask_NL, scale) for q, k, v, mask_NL in tails])

    return one_by_one


def _tail_mask(new: int, length: int, device: torch.device) -> Tensor:
    """Causal mask [N, L] of the last `new` of `length` tokens: True if a token attends to another."""
    return torch.ones(new, length, dtype=torch.bool, device=device).tril(length - new)


def _attention_of_tail(query_NHD: Tensor, key_LJD: Tensor, value_LJD: Tensor, mask_NL: Tensor, scale: float) -> Tensor:
    """Causal attention of the last N of L tokens."""
    times = query_NHD.shape[1] // key_LJD.shape[1]
    key, value = (x.transpose(0, 1).repeat_interleave(times, 0)[None] for x in (key_LJD, value_LJD))
    out = F.scaled_dot_product_attention(query_NHD.transpose(0, 1)[None], key, value, attn_mask=mask_NL, scale=scale)
    return out[0].transpose(0, 1)


class PrefillWork:
    """Counts the model FLOPs of the decoder for the prompts that an engine has prefilled."""

    def __init__(self, work: Work) -> None:
        self._work, self._run, self._copies = work, 0.0, 0.0

    def add(self, request: QueuedRequest) -> None:
        """Count a request, whose prompt is run once from its first new token on."""
        flops = self._work.prompt(request.prompt.num_tokens, ()) - self._work.prompt(request.first_new_token, ())
        self._run += flops
        self._copies += request.n * flops

    def take(self) -> Metrics:
        """Return the TFLOP since the last call: those computed, and those of one prefill for each completion."""
        found = {"rollout_prefill_tflop": self._run / TERA, "rollout_prefill_copies_tflop": self._copies / TERA}
        self._run = self._copies = 0.0
        return found
