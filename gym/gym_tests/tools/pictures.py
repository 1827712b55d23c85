"""Pictures for tools, and calls of tools."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from PIL import Image

from fovea_gym.tools.base import Picture, Tool
from fovea_gym.types import ImageRef
from gym_tests.images import from_array


def quartered(width: int = 80, height: int = 40) -> Image.Image:
    """A picture with a red, a green, a blue and a white quarter, row by row."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2] = (255, 0, 0)
    pixels[: height // 2, width // 2 :] = (0, 255, 0)
    pixels[height // 2 :, : width // 2] = (0, 0, 255)
    pixels[height // 2 :, width // 2 :] = 255
    return Image.fromarray(pixels)


def seen(*images: Image.Image) -> list[Picture]:
    return [Picture(ref=ImageRef(source=image), open_image=from_array) for image in images]


def parts_of(tool: Tool, pictures: Sequence[Picture] = (), **arguments: object) -> list[str | ImageRef]:
    return list(asyncio.run(tool.call(arguments, pictures)))


def image_of(tool: Tool, pictures: Sequence[Picture], **arguments: object) -> Image.Image:
    (part,) = parts_of(tool, pictures, **arguments)
    assert isinstance(part, ImageRef)
    return from_array(part)


def text_of(tool: Tool, pictures: Sequence[Picture] = (), **arguments: object) -> str:
    (part,) = parts_of(tool, pictures, **arguments)
    assert isinstance(part, str)
    return part
