"""Sizes of images as the run's model sees them, from its config and image processor, without the network."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from fovea.config.model import Model
from fovea.models.families.base import ModelFamily
from fovea.models.families.qwen_vl import GRID
from fovea.models.families.registry import family_of
from fovea.models.processor import load_processor
from fovea.models.tiny import FIXED, build_image_processor, tiny_config
from fovea.types import PromptImage
from fovea.wiring.model_trial import try_model
from fovea_gym.errors import ConfigError
from fovea_gym.rows.images import ImageOpener, Size
from fovea_gym.types import ImageRef

_THOUSANDTHS = (1000, 1000)
MOST_SIZES = 4096
"""Largest number of image sizes in the cache."""


class ModelPictures:
    """Image sizes for one model; its processor is loaded at the first use, and results are cached by size."""

    def __init__(self, settings: Model, opener: ImageOpener) -> None:
        self._settings = settings
        self._opener = opener
        self._sizes: dict[tuple[str, Size], Size] = {}

    def stored(self, ref: ImageRef) -> Size:
        """Width and height of the file in pixels, after EXIF rotation; for most files, only the header is read."""
        return self._opener(ref).size if self._opener.is_turned(ref) else self._opener.size(ref)

    def seen(self, ref: ImageRef) -> Size:
        """Width and height in pixels after the image processor; ConfigError for a family that tiles images."""
        return self._kept("seen", self.stored(ref))

    def frame(self, ref: ImageRef) -> Size:
        """Width and height of the frame in which the model's family gives coordinates; (1000, 1000) by default."""
        return self._kept("frame", self.stored(ref)) if self._gives_pixels else _THOUSANDTHS

    def _kept(self, kind: str, size: Size) -> Size:
        found = self._sizes.get((kind, size))
        if found is None:
            found = self._seen(size) if kind == "seen" else self._frame(size)
            if len(self._sizes) >= MOST_SIZES:
                self._sizes.clear()
            self._sizes[kind, size] = found
        return found

    def _look(self, size: Size) -> PromptImage:
        """A black image of this size, processed for the model."""
        family, image_processor = self._eye
        options = family.image_options(image_processor, self._settings.min_pixels, self._settings.max_pixels)
        blank_YXC = np.zeros((size[1], size[0], 3), np.uint8)
        return family.prompt_image(image_processor(images=[blank_YXC], return_tensors="np", **options))

    def _seen(self, size: Size) -> Size:
        family, image_processor = self._eye
        image = self._look(size)
        if GRID not in image.tensors:
            raise ConfigError(
                f"environment.coordinates=pixels, but {family.model_type} cuts images into tiles, so they have no "
                "single size; set environment.coordinates=thousandths, or original"
            )
        _, rows, columns = image.grid
        side = int(image_processor.patch_size)
        return columns * side, rows * side

    def _frame(self, size: Size) -> Size:
        return self._eye[0].box_frame(self._look(size)) or _THOUSANDTHS

    @cached_property
    def _eye(self) -> tuple[ModelFamily, Any]:
        """The family and the image processor of the model."""
        if self._settings.tiny is not None:
            family = family_of(tiny_config(self._settings.tiny), "model.tiny")
            return family, build_image_processor(FIXED.patch_size_px)
        try_model(self._settings)
        processor = load_processor(self._settings)
        return processor.family, processor.image_processor

    @cached_property
    def _gives_pixels(self) -> bool:
        return self._frame((64, 64)) != _THOUSANDTHS
