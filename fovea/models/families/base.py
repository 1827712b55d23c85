"""The interface of a model family: what Fovea has to know of a model beyond transformers' own classes.

Axes: `L` token ids, `X` axes of a position (3 with M-RoPE: time, height, width; else 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from fovea.models.families.layer import LayerModules
from fovea.models.flops import Work
from fovea.models.vision.features import ImageFeatures
from fovea.types import PromptImage


class FastPath(Protocol):
    """The parts of a network that packed rows and the embedded engine's own decoding call one by one."""

    def layer(self, module: Any) -> LayerModules:
        """The modules of a decoder layer of transformers."""
        ...

    def encode(self, tower: nn.Module, images: Sequence[PromptImage]) -> list[ImageFeatures]:
        """One pass of the vision tower over all images; features by image."""
        ...

    def activation_bytes(self, tower: nn.Module, images: Sequence[PromptImage]) -> int:
        """About what `encode` keeps for its backward pass."""
        ...


class ModelFamily(Protocol):
    """One model family, configured for one model."""

    @property
    def model_type(self) -> str:
        """The name in transformers' config."""
        ...

    @property
    def vision_paths(self) -> tuple[str, ...]:
        """Module paths of the vision tower and, where that is apart, of the projector behind it."""
        ...

    @property
    def language_path(self) -> str:
        """Module path of the decoder stack."""
        ...

    @property
    def image_token(self) -> str:
        """The mark that the chat template writes once per image."""
        ...

    @property
    def image_token_id(self) -> int:
        """Id of the token whose embeddings are replaced by image features."""
        ...

    @property
    def video_processor(self) -> str | None:
        """transformers' class that an exported folder names for videos; None for a family without videos."""
        ...

    @property
    def fast_path(self) -> FastPath | None:
        """None: only transformers' own forward (`models.plain`)."""
        ...

    @property
    def work(self) -> Work:
        """Floating point operations of the parts of a forward pass."""
        ...

    def load_image_processor(self, path: str, revision: str) -> Any:
        """An image processor that needs PIL and numpy only; OSError or ValueError where the model has none."""
        ...

    def image_options(self, image_processor: Any, min_pixels: int | None, max_pixels: int | None) -> Mapping[str, Any]:
        """Arguments for the image processor; ConfigError for a limit that the family does not have."""
        ...

    def prompt_image(self, processed: Mapping[str, Any]) -> PromptImage:
        """The record of one image, from what the image processor returned for it."""
        ...

    def image_ids(self, image: PromptImage, tokenizer: PreTrainedTokenizerBase) -> NDArray[np.int64]:
        """Token ids that take the place of the image's mark."""
        ...

    def positions(
        self, token_ids_L: NDArray[np.int64], images: Sequence[PromptImage], start: int
    ) -> tuple[NDArray[np.int64], int]:
        """Positions [X, L] of a stretch of a conversation, and the position of the token after it.

        `start` is the position of its first token: 0 for a prompt, then the position that the stretch before ended on.
        """
        ...

    def forward_inputs(self, token_ids: Tensor, images: Sequence[PromptImage]) -> dict[str, Tensor]:
        """Arguments of transformers' forward besides ids and mask, on the device of the ids [rows, L].

        `images`: those of all rows, in order.
        """
        ...
