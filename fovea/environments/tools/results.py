"""Results of tools as parts of a message: texts and pictures within limits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from fovea.data.images import OpenImage, is_url
from fovea.environments.tools.base import BadResultError
from fovea.errors import BadRowError
from fovea.types import ImageRef

MAX_CHARACTERS = 8_000
"""Characters of a result; what is longer is cut, with a note."""
MAX_PICTURES = 8
MAX_MEGAPIXELS = 16.0
KINDS = "a text, a number, a dict, a picture (Pillow, uint8 values of numpy, ImageRef) or a list of these"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultLimits:
    """The checks of pictures that tools return."""

    open_image: OpenImage
    image_root: str | None = None
    """Folder in which paths of pictures have to be; None: a tool returns no paths."""


def as_parts(result: object, tool: str) -> list[str | ImageRef]:
    """The texts and pictures of a result; BadResultError for an object of another kind."""
    if isinstance(result, Sequence) and not isinstance(result, str | bytes):
        if _is_plain(result):
            return [_json(result, tool)]
        return [part for each in result for part in as_parts(each, tool)]
    if isinstance(result, str | ImageRef):
        return [result]
    if isinstance(result, Image.Image | np.ndarray):
        return [ImageRef(source=result, where=f"a picture of {tool}")]
    if isinstance(result, Mapping | int | float | np.generic):
        return [_json(result, tool)]
    raise BadResultError(f"{tool} returned an object of type {type(result).__name__}; a tool returns {KINDS}")


def checked_parts(parts: Sequence[str | ImageRef], tool: str, limits: ResultLimits) -> list[str | ImageRef]:
    """The parts with pictures decoded and texts cut; BadResultError for a picture that cannot be shown."""
    pictures = sum(isinstance(part, ImageRef) for part in parts)
    if pictures > MAX_PICTURES:
        raise BadResultError(f"{tool} returned {pictures} pictures; the limit is {MAX_PICTURES}")
    left, found = MAX_CHARACTERS, list[str | ImageRef]()
    for part in parts:
        if isinstance(part, ImageRef):
            found.append(_opened(part, tool, limits))
            continue
        found.append(part if len(part) <= left else f"{part[:left]}... ({len(part) - left} more characters)")
        left = max(0, left - len(part))
    return found or [""]


def _opened(ref: ImageRef, tool: str, limits: ResultLimits) -> ImageRef:
    """A picture in memory, so that no later step can fail to open it."""
    _check_place(ref.source, tool, limits.image_root)
    _check_size(ref.source, tool)
    try:
        image = limits.open_image(ref)
    except BadRowError as error:
        # the advice for rows that follows does not concern a tool
        raise BadResultError(f"{tool} returned a picture that cannot be shown: {str(error).split(';')[0]}") from error
    _check_size(image, tool)
    return ImageRef(source=image, where=ref.where)


def _check_place(source: object, tool: str, image_root: str | None) -> None:
    if not isinstance(source, str):
        return
    inside = image_root is not None and not is_url(source)
    if not (inside and Path(source).resolve().is_relative_to(Path(str(image_root)).resolve())):
        place = "data.image_root" if image_root is None else f"data.image_root={image_root}"
        raise BadResultError(
            f"{tool} returned the path {source:.200}, which is not inside {place}; return the picture itself"
        )


def _check_size(source: object, tool: str) -> None:
    if isinstance(source, Image.Image):
        width, height = source.size
    elif isinstance(source, np.ndarray) and source.ndim >= 2:
        height, width = source.shape[:2]
    else:
        return
    if width * height / 1e6 > MAX_MEGAPIXELS:
        raise BadResultError(
            f"{tool} returned a picture of {width}x{height} pixels; the limit is {MAX_MEGAPIXELS:g} megapixels"
        )


def _is_plain(values: Sequence[object]) -> bool:
    """True for numbers, and lists of them, which are written as one text."""
    return all(
        isinstance(each, int | float | np.number) or (isinstance(each, list | tuple) and _is_plain(each))
        for each in values
    )


def _json(result: object, tool: str) -> str:
    try:
        return json.dumps(result, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadResultError(
            f"{tool} returned a value that is not JSON ({error!s:.100}); a tool returns {KINDS}"
        ) from error


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.size < MAX_CHARACTERS:
        return value.tolist()
    raise TypeError(f"{type(value).__name__} in it")
