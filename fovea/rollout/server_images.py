"""Images by address in requests to an engine's server: refused, or read here and handed to the engine as data.

The engines themselves fetch from this machine and its network, and SGLang opens files.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fovea.data.fetch import UrlLimits, fetch
from fovea.data.images import ImageOpener
from fovea.errors import BadRowError
from fovea.types import ImageRef

SOURCES = ("url", "image", "video", "audio")
"""Names in messages, or their ends as in `image_url`, under which engines take files by address."""
IMAGE = "image_url"
MAX_ADDRESSES = 16
"""Images by address in one request, which are read one after another."""
MAX_BYTES = 48 << 20
"""Of all images by address in one request; as base64, they are as much as the longest request."""
MAX_MEGAPIXELS = 64.0
DATA_ONLY = b"images come as data: URLs; this server opens no addresses or files"
IMAGES_ONLY = b"images come as image_url, with a data:, http:// or https:// URL; this server opens no other addresses"
TOO_MANY = b"more than %d images by address" % MAX_ADDRESSES
# one for all, so that it does not tell what exists at an address
UNREADABLE = b"an image could not be read at its address; send it as a data: URL"
TOO_LONG = b"images by address of more than %d bytes" % MAX_BYTES


class ImageRefusedError(Exception):
    """A request with an image that is not read; its argument is the answer."""


@dataclass(frozen=True, slots=True)
class ImageAddress:
    """A place in messages with something to be fetched or opened, rather than given as data."""

    holder: dict[str, Any]
    name: str
    is_image: bool

    @property
    def url(self) -> str:
        url: str = self.holder[self.name]
        return url


def addresses(messages: Any) -> Iterator[ImageAddress]:
    """All addresses in messages."""
    left = [("", messages)]
    while left:
        name, part = left.pop()
        if isinstance(part, list):
            left.extend((name, each) for each in part)
        elif isinstance(part, dict):
            left.extend(part.items())
            for key, value in part.items():
                if key.endswith(SOURCES) and isinstance(value, str) and not value.startswith("data:"):
                    yield ImageAddress(part, key, is_image=key == IMAGE or (name, key) == (IMAGE, "url"))


async def replace_addresses(messages: Any, limits: UrlLimits | None) -> None:
    """Put images in the places of their addresses, as data: URLs; ImageRefusedError for what is not read.

    No address at all is read without `limits`.
    """
    found = list(addresses(messages))
    if found and limits is None:
        raise ImageRefusedError(DATA_ONLY)
    if not all(address.is_image for address in found):
        raise ImageRefusedError(IMAGES_ONLY)
    if len(found) > MAX_ADDRESSES:
        raise ImageRefusedError(TOO_MANY)
    if limits is not None and found:
        # on a thread: the server answers others meanwhile
        contents = await asyncio.to_thread(_contents, [address.url for address in found], limits)
        for address, content in zip(found, contents, strict=True):
            address.holder[address.name] = f"data:image/*;base64,{base64.b64encode(content).decode()}"


def _contents(urls: Sequence[str], limits: UrlLimits) -> list[bytes]:
    opener, contents = ImageOpener(max_mib=limits.max_mib, max_megapixels=MAX_MEGAPIXELS), list[bytes]()
    for url in urls:
        try:
            contents.append(fetch(url, IMAGE, limits))
            opener.size(ImageRef(source=contents[-1]))  # in its header; the engine decodes it
        except BadRowError as error:
            raise ImageRefusedError(UNREADABLE) from error
        if sum(map(len, contents)) > MAX_BYTES:
            raise ImageRefusedError(TOO_LONG)
    return contents
