"""The first pass over prompts: images encoded, keys and values stored, all prompts packed into one row.

Axes: `P` prompts, `N` tokens of the row, `E` width of the model, `J`, `L`, `D` as in `cache`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fovea.models.decoder import Attend, DecoderShape, VisualResidual, decode
from fovea.models.image_features import ImageFeatures, concatenate
from fovea.models.layout import shared_prefix_layout
from fovea.models.row_attention import causal_prompts
from fovea.models.vlm import VLM
from fovea.rollout.embedded.cache import GroupCache
from fovea.rollout.embedded.groups import Request
from fovea.rollout.embedded.weights import TextWeights
from fovea.types import Prompt


def prefill(
    vlm: VLM,
    weights: TextWeights,
    shape: DecoderShape,
    requests: Sequence[Request],
    graph: Mapping[str, ImageFeatures] = {},
) -> tuple[Tensor, GroupCache]:
    """Hidden states [P, E] that predict the first tokens, and a cache that holds the prompts."""
    device = weights.embed.device
    lengths_P = torch.tensor([request.prompt.num_tokens for request in requests])
    layout = shared_prefix_layout(lengths_P.tolist(), [[] for _ in requests]).to(device)
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def attend(_layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, key_PJLD, value_PJLD = causal_prompts(query, key, value, layout, shape.scale)
        keys.append(key_PJLD)
        values.append(value_PJLD)
        return out

    hidden_NE = _prompt_pass(vlm, weights, shape, [request.prompt for request in requests], attend, graph)
    cache = GroupCache.of_prompts(
        keys,
        values,
        lengths_P.to(device),
        group_size=requests[0].n,
        room_tokens=max(request.sampling.max_new_tokens for request in requests),
    )
    return hidden_NE[(lengths_P.cumsum(0) - 1).to(device)], cache


def _prompt_pass(
    vlm: VLM,
    weights: TextWeights,
    shape: DecoderShape,
    prompts: Sequence[Prompt],
    attend: Attend,
    graph: Mapping[str, ImageFeatures],
) -> Tensor:
    device = weights.embed.device
    token_ids_N = torch.from_numpy(np.concatenate([prompt.token_ids_L for prompt in prompts])).to(device)
    positions_3N = torch.from_numpy(np.concatenate([prompt.positions_3L for prompt in prompts], axis=1)).to(device)
    hidden_NE = weights.embed[token_ids_N]
    images = [image for prompt in prompts for image in prompt.images]
    visual = None
    if images:
        features = concatenate(
            [graph[i.key].map(Tensor.detach) for i in images] if graph else vlm.image_features(images)
        )
        pads = (token_ids_N == vlm.image_pad_id).nonzero()[:, 0]
        hidden_NE = hidden_NE.index_copy(0, pads, features.embeds_VD)
        visual = VisualResidual(tokens=pads, layers=features.deepstack_VD)
    return decode(weights.decoder, shape, hidden_NE, vlm.rope(positions_3N, hidden_NE), attend, visual)
