"""Conversion of a row's image cells, in the forms that data sets use, to references to images.

Nothing is opened here. A path must lie in the folder of its data file, so that a data set from somebody else cannot
read other files of this machine. Web and object-store URLs may point anywhere; other protocols are refused, since
some of those that fsspec supports read this machine or its network.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote, urljoin

import numpy as np
from PIL.Image import Image

from fovea_gym.errors import BadRowError
from fovea_gym.rows.images import is_url
from fovea_gym.types import ImageRef

# The smallest PNG has 67 bytes; no file name of that length lacks a dot.
# The possessive {80,}+ never gives blanks back to the \s* after it: trying each of them would take quadratic time.
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{80,}+={0,2}\s*|(?:iVBORw0KGgo|/9j/|R0lGOD|UklGR)[^.]{70,}")
_DATA_URI = re.compile(r"data:image/[a-z0-9.+-]+(;[^,;]*)*;base64,", re.IGNORECASE)
_ANYWHERE = re.compile(r"(https?|s3a?|gs|gcs)://")
_IPV6_HOST = re.compile(r"https?://\[[0-9A-Fa-f:.%]+\]")
_LONGEST_PATH = 4096
"""In characters: Linux accepts no longer path, and the time to resolve a path is quadratic in its slashes."""


def image_refs(
    *cells: object, where: str, folder: str | Path | None, image_root: str = "image_root"
) -> tuple[ImageRef, ...]:
    """Return references to the images of a row's cells, numbered from 1 over all cells; BadRowError naming `where`.

    A cell is one image or a list of images; None is not an image. An image is encoded bytes (also as a numpy array), a
    {bytes, path} struct, base64 text (bare or as a data URI), a path relative to `folder` (a URL if the data file is
    remote), a URL (https://, http://, s3://, gs://), a Pillow image, or RGB values [height, width, 3]. `folder` is None
    for rows made by user code; their paths are relative to the working directory and may lead anywhere. `image_root` is
    the name that errors use for the setting of another folder.
    """
    images = [image for cell in cells for image in _listed(cell)]
    folder = None if folder is None else str(folder)
    names = (f"{where}, image {n}" for n in range(1, len(images) + 1))
    return tuple(_image_ref(*each, folder, image_root) for each in zip(images, names, strict=True))


def _listed(cell: object) -> Iterator[object]:
    if cell is None:
        return
    if isinstance(cell, np.ndarray) and cell.dtype == object:
        cell = cell.tolist()  # pandas reads a list of structs as an object array
    if isinstance(cell, list | tuple):
        yield from cell
    else:
        yield cell


def _image_ref(image: object, where: str, folder: str | None, image_root: str) -> ImageRef:
    if isinstance(image, Mapping):
        content = image.get("bytes")
        image = image.get("path") if content is None else content
    if isinstance(image, np.ndarray) and image.ndim < 2 and (image.dtype == np.uint8 or image.dtype.kind == "S"):
        image = image.tobytes()
    if isinstance(image, bytearray | memoryview | np.bytes_):
        image = bytes(image)
    if isinstance(image, bytes | np.ndarray | Image):
        return ImageRef(source=image, where=where)
    if isinstance(image, os.PathLike):
        image = os.fspath(image)
    if isinstance(image, str) and image.strip():
        return ImageRef(source=_from_text(image, where, folder, image_root), where=where)
    seen = "an empty text" if isinstance(image, str) else f"a value of type {type(image).__name__}"
    raise BadRowError(
        f"{where}: {seen} is not an image",
        "image_kind",
        "store encoded bytes, base64, a path, a URL or a {bytes, path} struct",
    )


def _from_text(text: str, where: str, folder: str | None, image_root: str) -> bytes | str:
    if text.startswith("data:"):
        head = _DATA_URI.match(text)
        if head is None:
            problem = f"{text[:40]}... is not a data URI of an image in base64"
            raise BadRowError(f"{where}: {problem}", "image_base64", "write data:image/png;base64,...")
        return _unbase64(text[head.end() :], where)
    if _BASE64.fullmatch(text):
        return _unbase64(text, where)
    return _located(text, where, folder, image_root)


def _unbase64(text: str, where: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        problem = f"the base64 text of the image is damaged ({error})"
        raise BadRowError(f"{where}: {problem}", "image_base64", "write it again") from error


def _located(path: str, where: str, folder: str | None, image_root: str) -> str:
    if "::" in _IPV6_HOST.sub("", path, count=1) and (is_url(path) or is_url(folder or "")):
        # fsspec reads s3://a::file:///b as a chain of protocols that ends at a file of this machine
        raise BadRowError(f"{where}: {path[:200]} is a chain of URLs", "url_invalid", "write the URL of one image")
    if _ANYWHERE.match(path):
        return path
    if len(path) > _LONGEST_PATH:
        problem = f"a text of {len(path)} characters, {path[:40]}..., is not an image and too long for a path"
        raise BadRowError(f"{where}: {problem}", "image_kind", "correct the row")
    if folder is None:
        if is_url(path):
            problem = f"{path[:200]} has a protocol that is not supported"
            fix = "give a path, or a URL at http(s)://, s3:// or gs://"
            raise BadRowError(f"{where}: {problem}", "image_outside_folder", fix)
        return os.path.abspath(path)
    inside = _below(folder, path)
    if inside is None:
        raise BadRowError(
            f"{where}: the path {path[:200]} leads out of {folder}, where the images of this data file are",
            "image_outside_folder",
            f"move the image there, set {image_root}, store its bytes in the row",
        )
    return inside


def _below(folder: str, path: str) -> str | None:
    """The full path or URL of a path below a folder or its URL; None if the path leads out of the folder."""
    if is_url(folder):
        return _below_url(folder, path)
    return None if is_url(path) else _below_folder(folder, path)


def _below_folder(folder: str, path: str) -> str | None:
    """The full path of a path below a folder; None if the path leads out of the folder."""
    root = os.path.realpath(folder)
    try:
        full = os.path.realpath(os.path.join(root, path))
    except ValueError:  # the name contains a NUL
        return None
    return full if full == root or full.startswith(root.rstrip(os.sep) + os.sep) else None


def _below_url(folder: str, path: str) -> str | None:
    """The URL of a path below the URL of a folder; None if the path leads out of the folder."""
    base = folder.rstrip("/") + "/"
    if is_url(path):
        return path if path.startswith(base) and ".." not in path.split("/") else None
    if path.startswith("/") or ".." in path.split("/"):
        return None
    return urljoin(base, quote(path)) if base.startswith("http") else base + path
