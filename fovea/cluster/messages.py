"""Messages between the driver and a worker process, in which an image crosses once.

Requests and batches repeat their images: every group's prompt goes to an engine, then to the policy for log-probs, then
for the update. A message names the images that an earlier one brought, and brings the others.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

from fovea.types import PromptImage


class Outbox:
    """The sending end of one connection."""

    def __init__(self) -> None:
        self.image_bytes = 0
        """Bytes of image tensors packed so far."""
        self._sent: set[str] = set()

    def pack(self, message: object) -> bytes:
        """Encode a message, with those of its images that the receiver does not hold."""
        body = io.BytesIO()
        pickler = _ImagePickler(body)
        pickler.dump(message)
        new = [image for key, image in pickler.images.items() if key not in self._sent]
        # the receiver holds nothing that this end does not remember
        header = _Header(images=new, forget=not self._sent)
        self._sent.update(image.key for image in new)
        self.image_bytes += sum(image.num_bytes for image in new)
        return pickle.dumps(header, pickle.HIGHEST_PROTOCOL) + body.getvalue()

    def forget(self) -> None:
        """Make the receiver free all images at the next message, and send them again where they are needed."""
        self._sent.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    images: list[PromptImage]
    """Images that the receiver does not hold yet."""
    forget: bool
    """The receiver frees the images of earlier messages first."""


class Inbox:
    """The receiving end of one connection."""

    def __init__(self) -> None:
        self._images: dict[str, PromptImage] = {}

    def unpack(self, data: bytes) -> Any:
        """Decode a message of an `Outbox`. It is a pickle: it must come from a process of the same run."""
        stream = io.BytesIO(data)
        header: _Header = pickle.load(stream)
        if header.forget:
            self._images.clear()
        self._images |= {image.key: image for image in header.images}
        return _ImageUnpickler(stream, self._images).load()


class _ImagePickler(pickle.Pickler):
    """Writes the key of an image in its place, and collects the images."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self.images: dict[str, PromptImage] = {}

    def persistent_id(self, value: object) -> str | None:
        if not isinstance(value, PromptImage):
            return None
        self.images[value.key] = value
        return value.key


class _ImageUnpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, images: dict[str, PromptImage]) -> None:
        super().__init__(stream)
        self._images = images

    def persistent_load(self, key: str) -> PromptImage:
        return self._images[key]
