"""Model FLOPs of text, attention and images, computed from a model's config.

Matrix products only, with a multiply-add as two FLOPs: norms, softmax, rotary positions and sums are left out, as is
usual for model FLOPs (Kaplan et al., arXiv 2001.08361, section 2.1). Attention counts the unmasked (query, key) pairs:
L (L + 1) / 2 in a prompt of L tokens. A kernel that also computes masked scores does up to twice as many FLOPs; model
FLOPs do not depend on the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fovea.models.decoder import decoder_shape
from fovea.models.delta_rule import DeltaShape
from fovea.types import PromptImage


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """FLOPs of a pass as multiples of a forward pass: 1 each for outputs, input gradients and weight gradients."""

    linear: float
    """Factor for the decoder's linear layers and the head."""
    attention: float
    """Factor for products of two activations (attention, the delta rule), which have gradients on both sides."""
    vision: float
    """Factor for the vision tower's linear layers; 0 if image features are cached."""
    vision_attention: float


FORWARD = Passes(linear=1, attention=1, vision=1, vision_attention=1)


def training_passes(*, lora: bool, trains_vision: bool, features_cached: bool) -> Passes:
    """Factors of a forward and backward pass; LoRA's adapters themselves are left out.

    The recomputation of gradient checkpointing is not counted: model FLOPs, not hardware FLOPs.
    """
    # frozen layers under LoRA have input gradients but no weight gradients
    linear = 2 if lora else 3
    if trains_vision:
        return Passes(linear=linear, attention=3, vision=linear, vision_attention=3)
    frozen_vision = 0 if features_cached else 1
    return Passes(linear=linear, attention=3, vision=frozen_vision, vision_attention=frozen_vision)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Forward FLOPs of a model, per token, patch or attention pair, summed over all layers."""

    token: float
    """FLOPs of a token in the decoder's linear layers."""
    pair: float
    """FLOPs of a (query, key) pair in the decoder's attention."""
    action: float
    """FLOPs of a token in the language-model head."""
    patch: float
    """FLOPs of a patch in the linear layers of the vision tower, including its share of the mergers."""
    image_pair: float
    """FLOPs of a (query, key) pair of patches in the vision layers with full attention."""
    window_pair: float
    """FLOPs of a (query, key) pair of patches in the vision layers with windowed attention."""
    window_side: int
    """Patches along a side of a window; 0 without windows."""
    rule: float = 0.0
    """FLOPs of a token in the products of delta nets with their states; 0 without delta nets."""

    def image(self, image: PromptImage, passes: Passes = FORWARD) -> float:
        """FLOPs of the vision tower on one image."""
        # a frame or tile attends to itself only
        frames, height, width = image.grid
        whole, windows = (height * width) ** 2, 0
        if self.window_side:
            windows = _sum_of_squares(height, self.window_side) * _sum_of_squares(width, self.window_side)
        attention = passes.vision_attention * (whole * self.image_pair + windows * self.window_pair)
        return frames * (passes.vision * height * width * self.patch + attention)

    def prompt(self, tokens: int, images: Sequence[PromptImage], passes: Passes = FORWARD) -> float:
        """FLOPs of a prompt and its images in a packed row, with causal attention."""
        pairs = tokens * (tokens + 1) // 2
        linear = passes.linear * tokens * self.token
        attention = passes.attention * (pairs * self.pair + tokens * self.rule)
        return linear + attention + self.images(images, passes)

    def images(self, images: Sequence[PromptImage], passes: Passes = FORWARD) -> float:
        """FLOPs of the vision tower on several images."""
        return sum(self.image(image, passes) for image in images)

    def completion(self, tokens: int, prompt_tokens: int, passes: Passes = FORWARD) -> float:
        """FLOPs of a completion in a packed row, with attention to its prompt and causally to itself."""
        # the last token is predicted and never an input
        inputs = tokens - 1
        pairs = inputs * prompt_tokens + inputs * tokens // 2
        linear = inputs * self.token + tokens * self.action
        return passes.linear * linear + passes.attention * (pairs * self.pair + inputs * self.rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionWork:
    """Forward FLOPs of a vision tower; the fields mean the same as in `Work`."""

    patch: float
    image_pair: float
    window_pair: float = 0.0
    window_side: int = 0


def text_work(text: Any, vision: VisionWork) -> Work:
    """Work of a decoder with gated MLPs, from its transformers config, and of its vision tower.

    In a layer with experts, a token's work is that of the router and of the experts that it runs through, including
    the shared expert and its weight. In a delta net it includes the convolution; the rule on the state, which is read,
    written and read again, is counted separately.
    """
    shape = decoder_shape(text)
    query_width, key_width = (shape.head_dim * n for n in (shape.num_heads, shape.num_kv_heads))
    gate_width = 0 if shape.delta is None else query_width
    attention = text.hidden_size * (2 * query_width + gate_width + 2 * key_width)
    nets = 0 if shape.delta is None else sum(shape.is_delta) * _net_work(shape.delta, text.hidden_size)
    return Work(
        token=2.0 * (shape.num_attention_layers * attention + nets + _mlp_weights(text)),
        pair=4.0 * query_width * shape.num_attention_layers,
        action=2.0 * text.hidden_size * text.vocab_size,
        patch=vision.patch,
        image_pair=vision.image_pair,
        window_pair=vision.window_pair,
        window_side=vision.window_side,
        rule=0.0 if shape.delta is None else 6.0 * sum(shape.is_delta) * shape.delta.widths[2] * shape.delta.key_dim,
    )


def _net_work(shape: DeltaShape, width: int) -> int:
    """Multiply-adds of a token in a delta net, without the delta rule."""
    channels, values = sum(shape.widths), shape.widths[2]
    linear = width * (channels + 2 * shape.value_heads) + 2 * width * values
    return linear + shape.window * channels


def _mlp_weights(text: Any) -> int:
    """Number of MLP weights that a token runs through, in all decoder layers together."""
    if not hasattr(text, "num_experts_per_tok"):
        return int(text.num_hidden_layers * _dense_weights(text))
    sparse = text.hidden_size * (text.num_experts + 3 * text.num_experts_per_tok * text.moe_intermediate_size)
    if hasattr(text, "shared_expert_intermediate_size"):
        # Qwen3_5MoeDecoderLayer has experts in every layer
        shared = text.hidden_size * (3 * text.shared_expert_intermediate_size + 1)
        return int(text.num_hidden_layers * (sparse + shared))
    # the rule of transformers' Qwen3VLMoeTextDecoderLayer
    has_experts = [
        layer not in text.mlp_only_layers and (layer + 1) % text.decoder_sparse_step == 0
        for layer in range(text.num_hidden_layers)
    ]
    return sum(sparse if sparsely else _dense_weights(text) for sparsely in has_experts)


def _dense_weights(text: Any) -> int:
    return int(3 * text.hidden_size * text.intermediate_size)


def vision_work(
    vision: Any,
    *,
    width: int,
    mlp_weights: int,
    out_width: int,
    mergers: int = 1,
    windowed_layers: int = 0,
    window_side: int = 0,
) -> VisionWork:
    """Work of a Qwen vision tower, from its transformers config and the sizes whose names differ by family."""
    # a merger concatenates spatial_merge_size^2 patches into one visual token
    merged = width * vision.spatial_merge_size**2
    embedding: int = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2 * width
    block: int = 4 * width**2 + int(mlp_weights)
    merger: float = merged * (merged + out_width) / vision.spatial_merge_size**2
    return VisionWork(
        patch=2.0 * (embedding + int(vision.depth) * block + mergers * merger),
        image_pair=4.0 * width * (vision.depth - windowed_layers),
        window_pair=4.0 * width * windowed_layers,
        window_side=int(window_side) if windowed_layers else 0,
    )


def _sum_of_squares(side: int, window: int) -> int:
    """Sum of squares of the lengths into which windows split a side; the last window may be smaller."""
    whole, rest = divmod(side, window)
    return whole * window**2 + rest**2
