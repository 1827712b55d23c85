"""The first pass over prompts: images encoded, keys and values stored, all prompts packed into one row.

Axes: `P` prompts, `N` tokens of the row, `E` width of the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fovea.models.attention import causal_prompts
from fovea.models.features import concatenate
from fovea.models.layout import shared_prefix_layout
from fovea.models.vlm import VLM
from fovea.rollout.embedded.cache import Cache, Span
from fovea.rollout.embedded.decoder import Attend, DecoderShape, VisualResidual, decode
from fovea.rollout.embedded.request import Request
from fovea.rollout.embedded.weights import TextWeights
from fovea.types import Prompt


def prefill(vlm: VLM, weights: TextWeights, shape: DecoderShape, requests: Sequence[Request], cache: Cache) -> Tensor:
    """Hidden states [P, E] that predict the first tokens; the cache then holds the prompts."""
    device = weights.embed.device
    lengths_P = torch.tensor([request.prompt.num_tokens for request in requests])
    layout = shared_prefix_layout(lengths_P.tolist(), [[] for _ in requests]).to(device)
    first = cache.add(requests)
    store = cache.writer([Span(prompt=first + i, start=0, end=r.prompt.num_tokens) for i, r in enumerate(requests)])

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        store(layer, key, value)
        return causal_prompts(query, key, value, layout, shape.scale)[0]

    hidden_NE = _prompt_pass(vlm, weights, shape, [request.prompt for request in requests], attend)
    return hidden_NE[(lengths_P.cumsum(0) - 1).to(device)]


def _prompt_pass(
    vlm: VLM, weights: TextWeights, shape: DecoderShape, prompts: Sequence[Prompt], attend: Attend
) -> Tensor:
    device = weights.embed.device
    token_ids_N = torch.from_numpy(np.concatenate([prompt.token_ids_L for prompt in prompts])).to(device)
    positions_3N = torch.from_numpy(np.concatenate([prompt.positions_3L for prompt in prompts], axis=1)).to(device)
    hidden_NE = weights.embed[token_ids_N]
    images = [image for prompt in prompts for image in prompt.images]
    visual = None
    if images:
        features = concatenate(vlm.image_features(images))
        pads = (token_ids_N == vlm.image_pad_id).nonzero()[:, 0]
        hidden_NE = hidden_NE.index_copy(0, pads, features.embeds_VD)
        visual = VisualResidual(tokens=pads, layers=features.deepstack_VD)
    return decode(weights, shape, hidden_NE, vlm.rope(positions_3N, hidden_NE), attend, visual)
