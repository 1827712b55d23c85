"""The first pass over prompts: images encoded, keys and values stored, prompts packed into one row.

Axes: `P` prompts, `N` tokens of the row, `E` width of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fovea.models.decoder import DecoderShape, VisualResidual, decode
from fovea.models.kernels import Rope
from fovea.models.vision.features import ImageFeatures, concatenate
from fovea.models.vlm import VLM
from fovea.rollout.embedded.cache import Cache
from fovea.rollout.embedded.chunked_prefill import PASS_TOKENS, prompt_attention, prompt_passes
from fovea.rollout.embedded.recorder import Recorder
from fovea.rollout.embedded.request import Request
from fovea.rollout.embedded.weights import TextWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """Prompts behind one another, as the first decoder layer sees them."""

    hidden_NE: Tensor
    rope: Rope
    visual: VisualResidual | None

    def part(self, start: int, end: int) -> PromptRow:
        """Tokens `start` to `end`."""
        if (start, end) == (0, len(self.hidden_NE)):
            return self
        visual = self.visual
        if visual is not None:
            inside = (visual.tokens >= start) & (visual.tokens < end)
            visual = VisualResidual(tokens=visual.tokens[inside] - start, layers=[x[inside] for x in visual.layers])
        return PromptRow(hidden_NE=self.hidden_NE[start:end], rope=self.rope.part(start, end), visual=visual)


def prefill(
    row: PromptRow,
    weights: TextWeights,
    shape: DecoderShape,
    requests: Sequence[Request],
    cache: Cache,
    recorder: Recorder,
    pass_tokens: int = PASS_TOKENS,
) -> Tensor:
    """Hidden states [P, E] that predict the first tokens; the cache then holds the prompts."""
    lengths = [request.prompt.num_tokens for request in requests]
    first, outs, places, start = cache.add(requests), [], [], 0
    for spans in prompt_passes(lengths, first, pass_tokens):
        part = row.part(start, start + sum(span.end - span.start for span in spans))
        whole = spans[0].end - spans[0].start == lengths[spans[0].prompt - first]
        attend = prompt_attention(spans, whole, cache, shape.scale, part.hidden_NE.device)
        with recorder.recording(len(part.hidden_NE)) as place:
            outs.append(decode(weights.decoder, shape, part.hidden_NE, part.rope, attend, part.visual))
        places.append(place)
        start += len(part.hidden_NE)
    recorder.prefilled(requests, places[0])
    last_P = torch.tensor(lengths).cumsum(0) - 1
    return torch.cat(outs)[last_P.to(row.hidden_NE.device)]


def prompt_row(
    vlm: VLM, weights: TextWeights, requests: Sequence[Request], features: Sequence[ImageFeatures]
) -> PromptRow:
    """The prompts with the features of their images, in order."""
    device, prompts = weights.embed.device, [request.prompt for request in requests]
    token_ids_N = torch.from_numpy(np.concatenate([prompt.token_ids_L for prompt in prompts])).to(device)
    positions_3N = torch.from_numpy(np.concatenate([prompt.positions_3L for prompt in prompts], axis=1)).to(device)
    hidden_NE = weights.embed[token_ids_N]
    visual = None
    if features:
        joined = concatenate(features)
        pads = (token_ids_N == vlm.image_pad_id).nonzero()[:, 0]
        hidden_NE = hidden_NE.index_copy(0, pads, joined.embeds_VD)
        visual = VisualResidual(tokens=pads, layers=joined.deepstack_VD)
    return PromptRow(hidden_NE=hidden_NE, rope=vlm.rope(positions_3N, hidden_NE), visual=visual)
