"""The model that is trained: a Qwen-VL of transformers with packed rows in and log-probs of actions out.

Axes: `N` tokens of a row, `A` actions, `V` visual tokens, `D` width, `W` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fovea.errors import ModelError
from fovea.models.attention import Kernel, use_packed_attention
from fovea.models.features import FeatureCache, ImageFeatures, concatenate
from fovea.models.fused import use_fused_layers
from fovea.models.parts import IMAGE_PAD, ModelParts, config_of, language_model, token_id, vision_tower
from fovea.models.row import PackedRow
from fovea.types import PromptImage


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """What the model says of each action of a row, in float32."""

    logprobs_A: Tensor
    entropies_A: Tensor


class VLM(nn.Module):
    """A Qwen-VL of any family. `forward` is the one entry for training, so that it can be sharded as a whole."""

    def __init__(
        self, parts: ModelParts, *, attention: Kernel = "sdpa", feature_cache: FeatureCache | None = None
    ) -> None:
        """`feature_cache` only with a vision tower that never changes."""
        super().__init__()
        self.network = parts.network
        self.image_pad_id = token_id(parts.tokenizer, IMAGE_PAD)
        self._feature_cache = feature_cache
        if "sliding_attention" in getattr(config_of(language_model(parts.network)), "layer_types", ()):
            raise ModelError(
                f"{parts.name}: its config asks for sliding-window attention, which packed rows do not have"
            )
        use_packed_attention(parts.network, attention)
        use_fused_layers(parts.network)

    def forward(
        self, row: PackedRow, *, temperature: float, chunk_tokens: int, entropy_grad: bool = False
    ) -> TokenScores:
        """Log-probs and entropies [A] at `temperature`; logits exist for `chunk_tokens` actions at a time."""
        hidden_AD = self.hidden_states(row)[row.hidden_index_A]
        head: nn.Module = self.network.get_submodule("lm_head")
        chunks = [
            _scores_of_chunk(head, hidden, targets, temperature, entropy_grad, recompute=len(hidden_AD) > chunk_tokens)
            for hidden, targets in zip(hidden_AD.split(chunk_tokens), row.target_ids_A.split(chunk_tokens), strict=True)
        ]
        logprobs, entropies = zip(*chunks, strict=True)
        return TokenScores(logprobs_A=torch.cat(logprobs), entropies_A=torch.cat(entropies))

    def hidden_states(self, row: PackedRow) -> Tensor:
        """Last hidden states [N, D], after the final norm."""
        embeds_ND: Tensor = self.network.get_input_embeddings()(row.token_ids_N)
        visual: dict[str, object] = {}
        if row.images:
            is_pad_N = row.token_ids_N == self.image_pad_id
            features = concatenate(self.image_features(row.images))
            embeds_ND = embeds_ND.index_put((is_pad_N.nonzero()[:, 0],), features.embeds_VD)
            if features.deepstack_VD:
                visual = {
                    "visual_pos_masks": is_pad_N[None],
                    "deepstack_visual_embeds": list(features.deepstack_VD),
                }
        out = language_model(self.network)(
            inputs_embeds=embeds_ND[None],
            position_ids=row.positions_3N[:, None],
            use_cache=False,
            layout=row.layout,
            **visual,
        )
        hidden: Tensor = out.last_hidden_state
        return hidden[0]

    @property
    def text_config(self) -> Any:
        """transformers' config of the language model."""
        return config_of(language_model(self.network))

    def rope(self, positions_3N: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [N, head width] of M-RoPE positions, of the type of `like`."""
        cos, sin = language_model(self.network).get_submodule("rotary_emb")(like, positions_3N[:, None])
        return cos[0], sin[0]

    def image_features(self, images: Sequence[PromptImage]) -> list[ImageFeatures]:
        """Features of each image; equal images are encoded once, and once for ever while the tower is frozen."""
        if self._feature_cache is not None:
            with torch.no_grad():
                return self._feature_cache.get(images, self._encode_one_by_one)
        distinct = {image.key: image for image in images}
        encoded = dict(zip(distinct, self.encode(list(distinct.values())), strict=True))
        return [encoded[image.key] for image in images]

    def _encode_one_by_one(self, images: Sequence[PromptImage]) -> list[ImageFeatures]:
        """Features that depend on no other image, to the last bit: a resumed run meets images in other company."""
        return [features for image in images for features in self.encode([image])]

    def encode(self, images: Sequence[PromptImage]) -> list[ImageFeatures]:
        """One pass of the vision tower over all the images."""
        tower = vision_tower(self.network)
        reference = next(tower.parameters())
        pixels = torch.from_numpy(np.concatenate([image.pixels_NC for image in images]))
        grids = torch.tensor([image.grid_thw for image in images], device=reference.device)
        out = tower(pixels.to(reference.device, reference.dtype), grid_thw=grids, return_dict=True)
        sizes: list[int] = (grids.prod(-1) // config_of(tower).spatial_merge_size ** 2).tolist()
        layers = [x.split(sizes) for x in (out.pooler_output, *getattr(out, "deepstack_features", ()))]
        return [
            ImageFeatures(embeds_VD=embeds, deepstack_VD=tuple(deepstack))
            for embeds, *deepstack in zip(*layers, strict=True)
        ]


def _scores_of_chunk(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    entropy_grad: bool,
    *,
    recompute: bool,
) -> tuple[Tensor, Tensor]:
    """`recompute` forgets the logits until the backward pass needs them."""
    if recompute and torch.is_grad_enabled():
        scores: tuple[Tensor, Tensor] = checkpoint(
            _token_scores, head, hidden, targets, temperature, entropy_grad, use_reentrant=False
        )
        return scores
    return _token_scores(head, hidden, targets, temperature, entropy_grad)


def _token_scores(
    head: nn.Module, hidden_AD: Tensor, targets_A: Tensor, temperature: float, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    logits_AW = head(hidden_AD).float() / temperature
    all_logprobs_AW = F.log_softmax(logits_AW, dim=-1)
    logprobs_A = all_logprobs_AW.gather(1, targets_A[:, None])[:, 0]
    for_entropy = all_logprobs_AW if entropy_grad else all_logprobs_AW.detach()
    return logprobs_A, -(for_entropy.exp() * for_entropy).sum(-1)
