"""The fast path: a transformers network run layer by layer on packed rows with shared prefixes.

Axes: `N` tokens of a row, `A` actions, `E` width of the model, `D` width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fovea.errors import ModelError
from fovea.models.activation_tape import LinearGroup
from fovea.models.decoder import LayerCall, VisualResidual, decoder_shape
from fovea.models.kernels import TORCH_KERNELS, Kernels, Rope, use_fused_layers
from fovea.models.modules import vision_tower
from fovea.models.policy_network import PolicyNetwork
from fovea.models.shared_prefix.attention import Kernel, row_attention
from fovea.models.shared_prefix.packed_row import PackedRow
from fovea.models.trained_layer import TrainedCall, use_layer_calls
from fovea.models.value_head import ValueHead
from fovea.models.vision.attention import use_segment_attention
from fovea.models.vision.feature_cache import FeatureCache
from fovea.models.vision.features import ImageFeatures, concatenate
from fovea.types import PromptImage


class VLM(PolicyNetwork):
    """PolicyNetwork on packed rows, each prompt computed once per row; also the model of the embedded engine."""

    def __init__(
        self,
        network: PreTrainedModel,
        banned_ids: Sequence[int],
        *,
        attention: Kernel = "auto",
        feature_cache: FeatureCache | None = None,
        kernels: Kernels = TORCH_KERNELS,
        value_head: ValueHead | None = None,
    ) -> None:
        """`banned_ids` as for any PolicyNetwork; `feature_cache` requires a frozen vision tower."""
        super().__init__(network, banned_ids, value_head)
        assert self.family.fast_path is not None, f"{self.family.model_type} has no fast path"
        self._fast = self.family.fast_path
        self._feature_cache = feature_cache
        if "sliding_attention" in getattr(self.text_config, "layer_types", ()):
            raise ModelError(
                f"{network.name_or_path}: its config asks for sliding-window attention, which packed rows do not have; "
                "set model.fast_path=off, or name a model without it in model.path"
            )
        self._attention = attention
        self._kernels = kernels
        self._shape = decoder_shape(self.text_config)
        use_segment_attention(network, eager=attention == "eager")
        use_fused_layers(network, kernels.norm)
        use_layer_calls(self._language_model, self._fast.layer)

    def action_states(self, row: PackedRow) -> Tensor:
        """Last hidden states [A, E], after the final norm, from which the actions are predicted."""
        language = self._language_model
        hidden_NE: Tensor = language.embed_tokens(row.token_ids_N)
        visual = None
        if row.images:
            features = concatenate(self.image_features(row.images) if row.features is None else row.features)
            pads = (row.token_ids_N == self.family.image_token_id).nonzero()[:, 0]
            hidden_NE = hidden_NE.index_put((pads,), features.embeds_VD)
            visual = VisualResidual(tokens=pads, layers=features.deepstack_VD)
        rope = self.rope(row.positions_3N, hidden_NE)
        attend = row_attention(self._attention, row.layout, self._shape.scale, hidden_NE)
        wanted, place_A = self._last_layer_tokens(row, visual)
        for index, layer in enumerate(language.layers):
            kept = wanted if index == self._shape.num_layers - 1 else None
            recorded = None if row.recorded is None else partial(row.recorded.outputs, index, kept)
            call = LayerCall(index, self._shape, rope, attend, self._kernels, kept)
            # through the module's own call, into which FSDP2 and gradient checkpointing hook
            hidden_NE = layer(hidden_NE, fovea=TrainedCall(call, recorded))
            if visual is not None and kept is None:
                hidden_NE = visual.add_to(hidden_NE, index)
        normed: Tensor = language.norm(hidden_NE)
        return normed[place_A]

    def _last_layer_tokens(self, row: PackedRow, visual: VisualResidual | None) -> tuple[Tensor | None, Tensor]:
        """Indices of the tokens whose output of the last layer is used (None: all), and each action's index among them.

        Prompt tokens but the last one serve as keys and values only, and need no output of the last layer.
        """
        # deepstack features are added to the visual tokens after this layer, by their index in the whole row
        if visual is not None and len(visual.layers) >= self._shape.num_layers:
            return None, row.hidden_index_A
        wanted, place_A = row.hidden_index_A.unique(return_inverse=True)
        return wanted, place_A

    @property
    def linear_widths(self) -> list[list[int]]:
        """Output widths of the groups of linear layers of each decoder layer, for the activation tape."""
        text, shape = self.text_config, self._shape
        heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        widths = {
            LinearGroup.QKV: heads,
            LinearGroup.OUTPUT: text.hidden_size,
            LinearGroup.GATE_UP: 2 * text.intermediate_size,
            LinearGroup.DOWN: text.hidden_size,
        }
        return [[widths[group] for group in LinearGroup]] * shape.num_layers

    def rope(self, positions_3N: Tensor, like: Tensor) -> Rope:
        """Rotary embedding of M-RoPE positions, in the type and on the device of `like`."""
        cos, sin = self._language_model.rotary_emb(like, positions_3N[:, None])
        return Rope.of(cos[0], sin[0])

    def image_features(self, images: Sequence[PromptImage]) -> list[ImageFeatures]:
        """Features of each image; equal images are encoded once, and cached features are reused."""
        if self._feature_cache is not None:
            with torch.no_grad():
                return self._feature_cache.get(images, self._encode_one_by_one)
        distinct = {image.key: image for image in images}
        encoded = dict(zip(distinct, self.encode(list(distinct.values())), strict=True))
        return [encoded[image.key] for image in images]

    def image_graph(self, images: Sequence[PromptImage]) -> dict[str, ImageFeatures]:
        """Features by image key with their autograd graph, to be shared by the rollout and the update after it."""
        distinct = {image.key: image for image in images}
        if not distinct:
            return {}
        with torch.enable_grad():
            return dict(zip(distinct, self.encode(list(distinct.values())), strict=True))

    def graph_bytes(self, images: Sequence[PromptImage]) -> int:
        """Estimated bytes of activations that `image_graph` keeps for the backward pass."""
        distinct = {image.key: image for image in images}
        return self._fast.activation_bytes(vision_tower(self.network), list(distinct.values()))

    def _encode_one_by_one(self, images: Sequence[PromptImage]) -> list[ImageFeatures]:
        """Features of each image from a forward pass of its own."""
        # a matrix product rounds differently with its number of rows: a resumed run, whose cache misses other images
        # together, would get other features
        return [features for image in images for features in self.encode([image])]

    def encode(self, images: Sequence[PromptImage]) -> list[ImageFeatures]:
        """Features of each image from one forward pass of the vision tower over all of them."""
        return self._fast.encode(vision_tower(self.network), images)

    @property
    def _language_model(self) -> Any:
        return self.network.get_submodule(self.family.language_path)
