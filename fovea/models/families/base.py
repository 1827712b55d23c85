"""What Fovea has to be told of a model family, beyond transformers' own classes.

Axes: `L` token ids, 3 = time, height and width of M-RoPE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fovea.types import PromptImage

ImageOptions = Mapping[str, Any]
"""Keyword arguments for an image processor."""


class ModelFamily(Protocol):
    """One model family, configured for one model."""

    @property
    def model_type(self) -> str:
        """The name in transformers' config."""
        ...

    @property
    def image_token(self) -> str:
        """The mark that the chat template writes once per image."""
        ...

    @property
    def image_token_id(self) -> int:
        """Id of the token whose embeddings are replaced by image features."""
        ...

    def load_image_processor(self, path: str, revision: str) -> Any:
        """An image processor that needs PIL and numpy only; OSError or ValueError where the model has none."""
        ...

    def image_options(self, image_processor: Any, min_pixels: int | None, max_pixels: int | None) -> ImageOptions:
        """How the image processor is told the limits of `model.min_pixels` and `model.max_pixels`."""
        ...

    def prompt_image(self, processed: Mapping[str, Any]) -> PromptImage:
        """The record of one image, from what the image processor returned for it."""
        ...

    def image_ids(self, image: PromptImage) -> NDArray[np.int64]:
        """Token ids that take the place of the image's mark."""
        ...

    def positions(
        self, token_ids_L: NDArray[np.int64], images: Sequence[PromptImage], start: int
    ) -> tuple[NDArray[np.int64], int]:
        """Positions [3, L] of a stretch of a conversation, and the position of the token after it.

        `start` is the position of its first token: 0 for a prompt, then the position that the stretch before ended on.
        """
        ...
