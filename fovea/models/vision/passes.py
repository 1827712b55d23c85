"""Forward passes of a vision tower over many images."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fovea.types import PromptImage

PASS_PATCHES = 16_384
"""Patches of a forward pass: 16 images of 512 px with patches of 16, enough to keep any GPU busy; at a width of 1,280,
the activations of a block in bfloat16 take some 0.5 GiB."""


def image_passes(images: Sequence[PromptImage], max_patches: int) -> Iterator[list[PromptImage]]:
    """The images in their order, split into passes of at most so many patches; a larger image has one to itself."""
    part: list[PromptImage] = []
    room = max_patches
    for image in images:
        patches = math.prod(image.grid)
        if part and patches > room:
            yield part
            part, room = [], max_patches
        part.append(image)
        room -= patches
    if part:
        yield part
