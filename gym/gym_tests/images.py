"""Images as the bytes of their files."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from fovea_gym.rows.images import ImageOpener

from_array = ImageOpener(max_image_mib=1, max_image_megapixels=4)
"""Opens images that are arrays."""


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(colour: str | tuple[int, int, int] = (1, 2, 3), width: int = 8, height: int | None = None) -> bytes:
    return encoded(Image.new("RGB", (width, height or width), colour))


def noise(seed: int, width: int = 48, height: int = 48) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))
