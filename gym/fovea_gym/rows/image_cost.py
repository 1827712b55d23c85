"""Cost of decoding an image beyond its pixels, estimated from the file's structure before Pillow opens it."""

from __future__ import annotations

import re
from typing import Literal

MAX_SCANS = 100
"""Maximum scans of a progressive JPEG; each scan passes over all pixels, and encoders write about ten."""
MAX_PARTS = 10_000
"""Maximum chunks of a PNG, or segments of a JPEG before its pixels; Pillow keeps an object for each."""
CHUNK_BYTES = 1024
"""A PNG may have more than MAX_PARTS chunks if they have this many bytes on average."""
MAX_PAGES = 1000
"""Maximum pages of a TIFF; Pillow takes quadratic time to count them."""
MAX_SIDE_PX = 100_000
"""Maximum width or height; Pillow keeps a pointer per line, more than the pixels of an image one pixel wide."""
BYTES_PER_PIXEL = 12
"""Decoding memory per pixel of `max_image_megapixels`: RGBA, its copy and the result."""
_BIG_TIFF = 43
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
"""Start of a JPEG segment that has a length, or the end of the image; coded pixels never contain these bytes."""
_JPEG_END, _JPEG_SCAN = b"\xff\xd9", b"\xff\xda"
_FILL = {b"\xff\xff": 1, b"\xff\x00": 2}
"""Number of bytes to skip for each kind of filler between JPEG segments, which Pillow skips with one call each."""
_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8"
_JPEG2000_SIZES = re.compile(rb"\xff\x4f\xff\x51(?=(.{38}))", re.DOTALL)
_JPEG2000_BYTES = 8
"""OpenJPEG's memory per pixel and component: an int32 in the tile and an int32 in the image."""
_JPEG2000_TILES, _JPEG2000_COMPONENTS = 4096, 4


def costly(content: bytes, max_megapixels: float) -> str | None:
    """The reason why decoding a file would cost more than its pixels; None if it does not."""
    if content.startswith(_PNG):
        return _costly_png(content)
    if content.startswith(_JPEG):
        return _costly_jpeg(content)
    if content.startswith((b"II", b"MM")):
        return _costly_tiff(content)
    for sizes in _JPEG2000_SIZES.finditer(content):
        if (problem := _costly_jpeg2000(sizes[1], max_megapixels)) is not None:
            return problem
    return None


def _costly_png(content: bytes) -> str | None:
    most, place = MAX_PARTS + len(content) // CHUNK_BYTES, len(_PNG)
    for _ in range(most):
        if place >= len(content):
            return None
        place += 12 + int.from_bytes(content[place : place + 4])  # length, name and checksum
    return f"the file has more than {most} chunks"


def _costly_jpeg(content: bytes) -> str | None:
    place = len(_JPEG)
    for _ in range(MAX_PARTS):
        marker = content[place : place + 2]
        if marker[:1] != b"\xff" or marker == _JPEG_SCAN:
            return _costly_scans(content, place)
        place += _FILL.get(marker) or 2 + int.from_bytes(content[place + 2 : place + 4])
    return f"the file has more than {MAX_PARTS} segments before its pixels"


def _costly_scans(content: bytes, place: int) -> str | None:
    """The problem with the scans from `place` on; data after the end of the picture, such as a video, is not read."""
    scans = 0
    for _ in range(MAX_PARTS):
        marker = _MARKER.search(content, place)
        if marker is None or marker[0] == _JPEG_END:
            return None
        scans += marker[0] == _JPEG_SCAN
        if scans > MAX_SCANS:
            return f"the file has more than {MAX_SCANS} scans, each of which takes the time of all pixels"
        place = marker.end() + int.from_bytes(content[marker.end() : marker.end() + 2])
    return f"the file has more than {MAX_PARTS} segments"


def _costly_tiff(content: bytes) -> str | None:
    """The problem with the chain of pages of a TIFF or BigTIFF file; offsets of a BigTIFF have 8 bytes."""
    order: Literal["little", "big"] = "little" if content.startswith(b"II") else "big"
    big = int.from_bytes(content[2:4], order) == _BIG_TIFF
    count_bytes, entry_bytes, offset_bytes, place = (8, 20, 8, 8) if big else (2, 12, 4, 4)
    for _ in range(MAX_PAGES + 1):
        page = int.from_bytes(content[place : place + offset_bytes], order)
        if not 0 < page < len(content):
            return None
        entries = int.from_bytes(content[page : page + count_bytes], order)
        place = page + count_bytes + entries * entry_bytes
    return f"the file has more than {MAX_PAGES} pages"


def _costly_jpeg2000(sizes: bytes, max_megapixels: float) -> str | None:
    """The problem with the image sizes in the SIZ marker of a JPEG 2000 code stream (ISO 15444-1, A.5.1)."""
    right, bottom, left, top, tile_width, tile_height = (
        int.from_bytes(sizes[place : place + 4]) for place in range(4, 28, 4)
    )
    components = int.from_bytes(sizes[36:38])
    width, height = max(right - left, 0), max(bottom - top, 0)
    if components > _JPEG2000_COMPONENTS:
        return f"the file has {components} components, more than {_JPEG2000_COMPONENTS}"
    tiles = -(-right // max(tile_width, 1)) * -(-bottom // max(tile_height, 1))
    if tiles > _JPEG2000_TILES:
        return f"the file has {tiles} tiles, more than {_JPEG2000_TILES}"
    num_bytes, most = width * height * components * _JPEG2000_BYTES, max_megapixels * 1e6 * BYTES_PER_PIXEL
    if num_bytes <= most:
        return None
    return f"decoding JPEG 2000 of {width}x{height} pixels takes {num_bytes / 2**20:.0f} MiB, above {most / 2**20:.0f}"
