"""Protocol of a model family: what rendering, packing and the forward pass need beyond transformers' own classes.

Axes: `L` token ids, `X` axes of a position (3 with M-RoPE: time, height, width; else 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fovea.models.experts import Experts
from fovea.models.flops import Work
from fovea.models.varlen import HeadShape
from fovea.models.vision.feature_cache import ImageFeatures
from fovea.types import PromptImage
from fovea_gym.rows.images import Size


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpModules:
    """Modules of a gated MLP."""

    inputs: Sequence[nn.Module]
    """Linear layers to gate and to up, or one linear layer to both, concatenated."""
    down: nn.Module


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpertModules:
    """Modules of an expert that all tokens run through."""

    mlp: MlpModules
    weight: nn.Module | None = None
    """Linear layer to the logit of the expert's weight; None if the weight is always 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionModules:
    """Modules of an attention layer."""

    query: nn.Module
    key: nn.Module
    value: nn.Module
    query_norm: nn.Module | None
    """Norm of each query head; None in families that do not normalise queries and keys."""
    key_norm: nn.Module | None
    output: nn.Module


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaModules:
    """Modules and parameters of a gated delta net."""

    inputs: Sequence[nn.Module]
    """Linear layers to queries, keys and values (one layer), to the output gate, to beta, and to the decay."""
    output: nn.Module
    conv_C1K: Tensor
    log_rate_V: Tensor
    decay_bias_V: Tensor
    norm_F: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerModules:
    """Modules of a pre-norm decoder layer."""

    input_norm: nn.Module
    mixer: AttentionModules | DeltaModules
    mixed_norm: nn.Module | None = None
    """Norm of the mixer's output, in families that have one."""
    post_norm: nn.Module
    mlp: MlpModules | Experts
    """Experts hold the current tensors of their modules, which FSDP2 replaces around every pass."""
    shared_expert: SharedExpertModules | None = None
    mlp_norm: nn.Module | None = None
    """Norm of the MLP's output, in families that have one."""


class FastPath(Protocol):
    """Access to the parts of a network, for packed rows and for decoding in the embedded engine."""

    def layer(self, module: Any) -> LayerModules:
        """Modules of a transformers decoder layer."""
        ...

    def encode(
        self, network: nn.Module, images: Sequence[PromptImage], device: torch.device, dtype: torch.dtype
    ) -> list[ImageFeatures]:
        """Features of each image, from one forward pass of the vision tower over all of them.

        Device and type are those of the pass; sharded weights have another device or type between passes.
        """
        ...

    def activation_bytes(self, network: nn.Module, images: Sequence[PromptImage]) -> int:
        """Estimated bytes of activations that `encode` keeps for the backward pass, in training mode."""
        ...

    def segment_heads(self, network: nn.Module, device: torch.device, dtype: torch.dtype) -> HeadShape | None:
        """Head shape of a tower that runs images as segments of one row; None for a tower that batches tiles."""
        ...


class ModelFamily(Protocol):
    """A model family, configured for one model."""

    @property
    def model_type(self) -> str:
        """The `model_type` of transformers' config."""
        ...

    @property
    def vision_paths(self) -> tuple[str, ...]:
        """Module paths of the vision tower and of the projector, if it is a separate module."""
        ...

    @property
    def projector_paths(self) -> tuple[str, ...]:
        """Module paths of the layers that turn the tower's output into visual tokens, inside or outside the tower."""
        ...

    @property
    def language_path(self) -> str:
        """Module path of the decoder stack, without the language-model head."""
        ...

    @property
    def image_token_id(self) -> int:
        """Id of the visual tokens, whose embeddings are replaced by image features."""
        ...

    @property
    def video_processor(self) -> str | None:
        """Class name of transformers' video processor, written to exported folders; None if there is no such class."""
        ...

    @property
    def fast_path(self) -> FastPath | None:
        """The fast path; None for a family that runs only with transformers' own forward (`models.plain`)."""
        ...

    @property
    def work(self) -> Work:
        """Forward FLOPs per token, patch and attention pair."""
        ...

    def load_image_processor(self, path: str, revision: str) -> Any:
        """An image processor that needs only PIL and numpy; OSError or ValueError if the model has none."""
        ...

    def image_options(self, image_processor: Any, min_pixels: int | None, max_pixels: int | None) -> Mapping[str, Any]:
        """Arguments of the image processor; ConfigError for a limit that the family does not support."""
        ...

    def fewest_tokens(self, image_processor: Any, size: Size, options: Mapping[str, Any]) -> int:
        """Number of visual tokens of an image of this size in pixels, or a lower bound, before it is processed.

        `options` come from `image_options`. ValueError for a shape that the image processor refuses.
        """
        ...

    def prompt_image(self, processed: Mapping[str, Any]) -> PromptImage:
        """Record of one image, from the output of the image processor."""
        ...

    def box_frame(self, image: PromptImage) -> tuple[int, int] | None:
        """Width and height of the coordinate system in which models localise on the image; None if they do not."""
        ...

    def image_mark(self, image_processor: Any) -> str:
        """Text of the token that the chat template writes once per image."""
        ...

    def image_text(self, image: PromptImage) -> str:
        """Text that replaces an image's mark before the prompt is tokenised; it has one token per visual token."""
        ...

    def positions(
        self, token_ids_L: NDArray[np.int64], images: Sequence[PromptImage], start: int
    ) -> tuple[NDArray[np.int64], int]:
        """Positions [X, L] of consecutive tokens of a conversation, and the position of the token after them.

        `start` is the position of the first token: 0 for a prompt, else the position that the previous call returned.
        """
        ...

    def forward_inputs(self, token_ids: Tensor, images: Sequence[PromptImage]) -> dict[str, Tensor]:
        """Arguments of the forward besides ids [rows, L] and mask, on their device; `images` of all rows, in order."""
        ...
