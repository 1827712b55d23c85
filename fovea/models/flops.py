"""The arithmetic of a pass: floating point operations of text, attention and images, from a model's config.

Matrix products only, a multiply and an add counted as two: norms, softmax, rotary positions and sums are left out,
as they are in published figures of model FLOPs (Kaplan et al., arXiv 2001.08361, section 2.1). Of attention the
(query, key) pairs that exist are counted: L (L + 1) / 2 in a prompt of L tokens. A kernel that computes masked scores
too makes up to twice as many; the work of a model does not depend on its kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fovea.types import PromptImage

Grid = tuple[int, int, int]
"""Patches of an image in time (or tiles), height and width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """How many forward passes a pass is worth: one each for the outputs, gradients of inputs, gradients of weights."""

    linear: float
    """Linear layers of the decoder, and the head."""
    attention: float
    vision: float
    """0: the features are there already."""


FORWARD = Passes(linear=1, attention=1, vision=1)


def training_passes(*, lora: bool, trains_vision: bool, features_cached: bool) -> Passes:
    """Forward and backward. With LoRA the frozen layers have no weight gradients; the adapters' own are left out.

    Layers that are recomputed in the backward pass count once: it is the same work, done twice.
    """
    frozen_vision = 0 if features_cached else 1
    return Passes(linear=2 if lora else 3, attention=3, vision=3 if trains_vision else frozen_vision)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Operations of the forward pass, each for one of its kind and over all layers."""

    token: float
    """A text token in the linear layers of the decoder."""
    pair: float
    """A (query, key) pair of the decoder."""
    action: float
    """A token in the head."""
    patch: float
    """A patch in the linear layers of the vision tower, its share of the mergers included."""
    image_pair: float
    """A pair of patches in the vision layers that look at the whole image."""
    window_pair: float
    """A pair of patches in those that look at a window."""
    window_side: int
    """Patches along a window; 0 without windows."""
    grid: Callable[[PromptImage], Grid]

    def image(self, image: PromptImage) -> float:
        """The vision tower on one image. Each frame attends to itself."""
        frames, height, width = self.grid(image)
        whole, windows = (height * width) ** 2, 0
        if self.window_side:
            windows = _sum_of_squares(height, self.window_side) * _sum_of_squares(width, self.window_side)
        return frames * (height * width * self.patch + whole * self.image_pair + windows * self.window_pair)

    def prompt(self, tokens: int, images: Sequence[PromptImage], passes: Passes = FORWARD) -> float:
        """A prompt in a packed row: its images, and its tokens causally among themselves."""
        pairs = tokens * (tokens + 1) // 2
        linear, attention = passes.linear * tokens * self.token, passes.attention * pairs * self.pair
        return linear + attention + self.images(images, passes)

    def images(self, images: Sequence[PromptImage], passes: Passes = FORWARD) -> float:
        """The vision tower on several images."""
        return passes.vision * sum(self.image(image) for image in images)

    def completion(self, tokens: int, prompt_tokens: int, passes: Passes = FORWARD) -> float:
        """A completion in a packed row, where its last token is only predicted; its keys are prompt and itself."""
        inputs = tokens - 1
        pairs = inputs * prompt_tokens + inputs * tokens // 2
        linear = inputs * self.token + tokens * self.action
        return passes.linear * linear + passes.attention * pairs * self.pair


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionWork:
    """The part of `Work` that the vision tower does."""

    patch: float
    image_pair: float
    window_pair: float = 0.0
    window_side: int = 0


def text_work(text: Any, vision: VisionWork, grid: Callable[[PromptImage], Grid]) -> Work:
    """The work of a decoder with gated MLPs, by its transformers config, behind a vision tower."""
    head_width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    query_width, key_width = (head_width * n for n in (text.num_attention_heads, text.num_key_value_heads))
    weights = text.hidden_size * (2 * query_width + 2 * key_width + 3 * text.intermediate_size)
    return Work(
        token=2.0 * weights * text.num_hidden_layers,
        pair=4.0 * query_width * text.num_hidden_layers,
        action=2.0 * text.hidden_size * text.vocab_size,
        patch=vision.patch,
        image_pair=vision.image_pair,
        window_pair=vision.window_pair,
        window_side=vision.window_side,
        grid=grid,
    )


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
    """The work of a Qwen vision tower, by its transformers config and what differs by family."""
    # a merger sees `merge`^2 patches as one
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
    """Of the lengths into which windows cut a side."""
    whole, rest = divmod(side, window)
    return whole * window**2 + rest**2
