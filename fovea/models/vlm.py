"""The fast path: a transformers network run layer by layer on packed rows with shared prefixes.

Axes: `N` tokens of a row, `U` actions of its unequal completions, `E` width of the model, `D` width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from fovea.errors import ModelError
from fovea.models.activation_tape import LinearGroup
from fovea.models.decoder import TORCH_KERNELS, Kernels, LayerCall, VisualResidual, decoder_shape, kernels_for
from fovea.models.delta_rule import row_scan, slow_delta_note
from fovea.models.heads import ValueHead
from fovea.models.kernels import use_fused_layers
from fovea.models.modules import vision_tower
from fovea.models.policy_network import PolicyNetwork
from fovea.models.rope import Rope
from fovea.models.shared_prefix.attention import Kernel, heads_of, row_attention, slow_attention_note
from fovea.models.shared_prefix.layout import PackedRow
from fovea.models.trained_layer import TrainedCall, use_layer_calls
from fovea.models.transformers_versions import rotary_tables
from fovea.models.vision.attention import slow_vision_note, use_segment_attention
from fovea.models.vision.feature_cache import Encode, FeatureCache, ImageFeatures, concatenate
from fovea.models.vision.tower_inputs import PASS_PATCHES, image_passes
from fovea.types import PromptImage


class VLM(PolicyNetwork):
    """PolicyNetwork on packed rows, in which each prompt is computed once; also the model of the embedded engine."""

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
                f"{network.name_or_path}: its config has sliding-window attention, which packed rows do not support; "
                "set model.fast_path=off, or name a model without it in model.path"
            )
        self._attention = attention
        self._shape = decoder_shape(self.text_config)
        self._kernels = kernels_for(self._shape, kernels)
        positions_X0, _ = self.family.positions(np.empty(0, dtype=np.int64), (), 0)
        self._num_axes = len(positions_X0)
        if self._fast.segment_heads(network, self.device, self.dtype) is not None:
            use_segment_attention(network, eager=attention == "eager")
        use_fused_layers(network, self._kernels.norm)
        use_layer_calls(self._language_model, self._fast.layer)

    def action_states(self, row: PackedRow) -> Tensor:
        """Last hidden states [U, E], after the final norm, from which the actions are predicted."""
        language = self._language_model
        hidden_NE: Tensor = language.embed_tokens(row.token_ids_N)
        visual = None
        if row.images:
            features = concatenate(self.image_features(row.images) if row.features is None else row.features)
            hidden_NE = hidden_NE.index_put((row.visual_index_V,), features.embeds_VD)
            visual = VisualResidual(tokens=row.visual_index_V, layers=features.deepstack_VD)
        rope = self.rope(row.positions_3N, hidden_NE)
        attend = row_attention(self._attention, row.layout, self._shape, hidden_NE)
        scan = None if self._shape.delta is None else row_scan(row.layout, self._shape.delta, hidden_NE)
        wanted, place_U = self._last_layer_tokens(row, visual)
        load = self.expert_load if self.training else None
        for index, layer in enumerate(language.layers):
            kept = wanted if index == self._shape.num_layers - 1 else None
            recorded = None if row.recorded is None else partial(row.recorded.outputs, index, kept)
            call = LayerCall(index, self._shape, rope, attend, self._kernels, kept, load, scan)
            # call the module itself, since FSDP2 and gradient checkpointing hook into its call
            hidden_NE = layer(hidden_NE, fovea=TrainedCall(call, recorded))
            if visual is not None and kept is None:
                hidden_NE = visual.add_to(hidden_NE, index)
        normed: Tensor = language.norm(hidden_NE)
        return normed[place_U]

    def _last_layer_tokens(self, row: PackedRow, visual: VisualResidual | None) -> tuple[Tensor | None, Tensor]:
        """Indices of the tokens whose output of the last layer is used (None: all), and each action's index among them.

        Prompt tokens other than the last one serve only as keys and values and need no output of the last layer.
        """
        # deepstack features are added to the visual tokens after this layer, by their index in the whole row
        if visual is not None and len(visual.layers) >= self._shape.num_layers:
            return None, row.hidden_index_U
        return row.predictor_index_M, row.predictor_U

    @property
    def linear_widths(self) -> list[list[int]]:
        """Output widths of the groups of linear layers of each decoder layer, for the activation tape.

        Empty for models with delta nets, or with experts, whose outputs belong to (token, expert) pairs instead of
        tokens.
        """
        text, shape = self.text_config, self._shape
        if shape.experts_per_token or shape.delta is not None:
            return []
        heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        widths = {
            LinearGroup.QKV: heads,
            LinearGroup.OUTPUT: text.hidden_size,
            LinearGroup.GATE_UP: 2 * text.intermediate_size,
            LinearGroup.DOWN: text.hidden_size,
        }
        return [[widths[group] for group in LinearGroup]] * shape.num_layers

    def rope(self, positions_3N: Tensor, like: Tensor) -> Rope:
        """Rotary embedding of positions [3, N] of M-RoPE or [1, N], in the type and on the device of `like`."""
        cos_ND, sin_ND = rotary_tables(self._language_model.rotary_emb, self.text_config, like, positions_3N)
        if self._shape.rotates_pairs:
            cos_ND, sin_ND = (x[:, ::2].repeat(1, 2) for x in (cos_ND, sin_ND))
        return Rope.of(cos_ND, sin_ND)

    def text_rope(self, position_N: Tensor, like: Tensor) -> Rope:
        """Rotary embedding of text tokens, which have one position on all axes."""
        return self.rope(position_N.expand(self._num_axes, -1), like)

    def image_features(self, images: Sequence[PromptImage]) -> list[ImageFeatures]:
        """Features of each image; equal images are encoded once, and cached features are reused."""
        return self._features(images, self.encode)

    def rollout_features(self, images: Sequence[PromptImage]) -> list[ImageFeatures]:
        """As `image_features`, but in passes of limited size, for the many images of a rollout.

        The weights must not be sharded: shards are gathered in every pass, and processes may differ in their number
        of passes.
        """
        return self._features(images, self._encode_in_passes)

    def _features(self, images: Sequence[PromptImage], encode: Encode) -> list[ImageFeatures]:
        if self._feature_cache is not None:
            with torch.no_grad():
                return self._feature_cache.get(images, self._encode_frozen)
        distinct = {image.key: image for image in images}
        encoded = dict(zip(distinct, encode(list(distinct.values())), strict=True))
        return [encoded[image.key] for image in images]

    def image_graph(self, images: Sequence[PromptImage]) -> dict[str, ImageFeatures]:
        """Features by image key with their autograd graph, to be shared by the rollout and the update after it."""
        distinct = {image.key: image for image in images}
        tower = vision_tower(self.network)
        trains = tower.training
        # blocks are checkpointed only in training mode; the graph of a whole rollout needs it most
        tower.train()
        try:
            with torch.enable_grad():
                return dict(zip(distinct, self._encode_in_passes(list(distinct.values())), strict=True))
        finally:
            tower.train(trains)

    def graph_bytes(self, images: Sequence[PromptImage]) -> int:
        """Estimated bytes of activations that `image_graph` keeps for the backward pass."""
        distinct = {image.key: image for image in images}
        return self._fast.activation_bytes(self.network, list(distinct.values()))

    def _encode_frozen(self, images: Sequence[PromptImage]) -> list[ImageFeatures]:
        """Features for the cache; on a CPU, each image gets a separate forward pass."""
        # the rounding of a matrix product depends on its number of rows: a resumed run, whose cache misses different
        # images together, would get different features. On a GPU, where resuming is not exact to the last bit, a
        # single image would leave most of the device idle
        if self.device.type == "cpu":
            return [features for image in images for features in self.encode([image])]
        return self._encode_in_passes(images)

    def _encode_in_passes(self, images: Sequence[PromptImage]) -> list[ImageFeatures]:
        return [features for part in image_passes(images, PASS_PATCHES) for features in self.encode(part)]

    def encode(self, images: Sequence[PromptImage]) -> list[ImageFeatures]:
        """Features of each image from one forward pass of the vision tower over all of them."""
        return self._fast.encode(self.network, images, self.device, self.dtype)

    def slow_kernels(self) -> list[str]:
        """Notes on kernels of the fast path that cannot be used on this GPU, and on what runs instead."""
        text = heads_of(self._shape, self.device, self.dtype)
        vision = self._fast.segment_heads(self.network, self.device, self.dtype)
        notes = [
            slow_attention_note(text) if self._attention == "auto" else None,
            None if vision is None else slow_vision_note(vision),
            None if self._shape.delta is None else slow_delta_note(self._shape.delta, self.device, self.dtype),
        ]
        return [note for note in notes if note is not None]

    @property
    def _language_model(self) -> Any:
        return self.network.get_submodule(self.family.language_path)
