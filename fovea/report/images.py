"""Images of sample records: PNG files in samples/images of the run folder, each stored once and named by its hash."""

from __future__ import annotations

import hashlib
import io
import re
from pathlib import Path

from PIL import Image

from fovea.evaluation.records import IMAGE_NAME
from fovea_gym.utils.bounded import read_file
from fovea_gym.utils.files import write_atomically

MAX_SIDE_PX = 768
"""Longer side of a stored image; larger images are downscaled to it, which is enough for display."""


def png_bytes(image: Image.Image, max_side_px: int = MAX_SIDE_PX) -> bytes:
    """The image as a PNG file, downscaled if a side is longer than `max_side_px`."""
    small = image.convert("RGB")
    small.thumbnail((max_side_px, max_side_px))
    buffer = io.BytesIO()
    small.save(buffer, format="PNG")
    return buffer.getvalue()


def name_of(png: bytes) -> str:
    """The name under which an image is stored: a hash of its PNG file."""
    return hashlib.sha256(png).hexdigest()[:16]


def write_image(run_dir: Path, png: bytes) -> str:
    """Store a PNG file in the run folder; returns the image's name."""
    name = name_of(png)
    path = image_path(run_dir, name)
    if not path.exists():
        write_atomically(path, png)
    return name


def image_path(run_dir: Path, name: str) -> Path:
    """Path of a stored image; ValueError for a name that `write_image` could not have returned."""
    if not re.fullmatch(IMAGE_NAME, name):
        raise ValueError(f"{name!r} is not the name of a stored image")
    return run_dir / "samples" / "images" / f"{name}.png"


def read_image(run_dir: Path, name: str) -> bytes | None:
    """Read the PNG file of a stored image; None if it was deleted from the run folder."""
    try:
        return read_file(image_path(run_dir, name), within=run_dir)
    except FileNotFoundError:
        return None
