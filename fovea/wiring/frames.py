"""Sizes of pictures as the run's model sees them, without its network: config and image processor are enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fovea.config.model import Model
from fovea.data.images import ImageOpener, Size
from fovea.errors import ConfigError
from fovea.models.families.base import ModelFamily
from fovea.models.families.qwen_vl import GRID
from fovea.models.families.registry import family_of
from fovea.models.processor import load_processor
from fovea.models.tiny import FIXED, build_image_processor, tiny_config
from fovea.types import ImageRef, PromptImage

_THOUSANDTHS = (1000, 1000)
MOST_SIZES = 4096
"""Sizes of pictures of which the frames are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Eye:
    """The part of a model that resizes pictures."""

    family: ModelFamily
    image_processor: Any
    options: Mapping[str, Any]

    @classmethod
    def of(cls, settings: Model) -> _Eye:
        if settings.tiny is not None:
            family = family_of(tiny_config(settings.tiny), "model.tiny")
            image_processor = build_image_processor(FIXED.patch_size_px)
        else:
            processor = load_processor(settings)
            family, image_processor = processor.family, processor.image_processor
        options = family.image_options(image_processor, settings.min_pixels, settings.max_pixels)
        return cls(family=family, image_processor=image_processor, options=options)

    def look(self, size: Size) -> PromptImage:
        """A black picture of this size as the model sees it."""
        blank_YXC = np.zeros((size[1], size[0], 3), np.uint8)
        return self.family.prompt_image(self.image_processor(images=[blank_YXC], return_tensors="np", **self.options))

    def seen(self, image: PromptImage) -> Size:
        """Width and height in pixels; ConfigError for a family that cuts pictures into tiles."""
        if GRID not in image.tensors:
            raise ConfigError(
                f"environment.coordinates=pixels, but {self.family.model_type} sees pictures in tiles, not one size; "
                "set environment.coordinates=thousandths, or original"
            )
        _, rows, columns = image.grid
        side = int(self.image_processor.patch_size)
        return columns * side, rows * side


class ModelPictures:
    """Sizes of pictures for one model; its processor is loaded at the first use, and frames are kept by size."""

    def __init__(self, settings: Model, opener: ImageOpener) -> None:
        self._settings = settings
        self._opener = opener
        self._sizes: dict[tuple[str, Size], Size] = {}

    def stored(self, ref: ImageRef) -> Size:
        """Width and height in pixels of the file, turned as it is shown; most files are read up to their header."""
        return self._opener(ref).size if self._opener.is_turned(ref) else self._opener.size(ref)

    def seen(self, ref: ImageRef) -> Size:
        """Width and height in pixels after the model's image processor."""
        return self._kept("seen", self.stored(ref))

    def frame(self, ref: ImageRef) -> Size:
        """Width and height in which the model's family gives coordinates; 1000 each, where it gives none."""
        return self._kept("frame", self.stored(ref)) if self._gives_pixels else _THOUSANDTHS

    def _kept(self, kind: str, size: Size) -> Size:
        found = self._sizes.get((kind, size))
        if found is None:
            image = self._eye.look(size)
            found = self._eye.seen(image) if kind == "seen" else self._frame(image)
            if len(self._sizes) >= MOST_SIZES:
                self._sizes.clear()
            self._sizes[kind, size] = found
        return found

    def _frame(self, image: PromptImage) -> Size:
        return self._eye.family.box_frame(image) or _THOUSANDTHS

    @cached_property
    def _eye(self) -> _Eye:
        return _Eye.of(self._settings)

    @cached_property
    def _gives_pixels(self) -> bool:
        return self._frame(self._eye.look((64, 64))) != _THOUSANDTHS
