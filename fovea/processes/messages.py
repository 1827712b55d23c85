"""Messages between the driver and a worker process, which send each image at most once, and only where it is needed.

Requests and batches repeat their images: every group's prompt goes to an engine, then to the policy for log-probs, and
again for the update. A message refers to its images by key, and contains the pixels of those that the receiver needs
and does not have yet.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from fovea.types import PromptImage

Reference: TypeAlias = tuple[str, int, tuple[int, int, int]]
"""Stand-in for an image in a message: its key, number of tokens and grid."""


class Packing:
    """One end of a connection: it packs messages, and unpacks messages that the other end's `Packing` has packed."""

    def __init__(self) -> None:
        self.image_bytes = 0
        """Bytes of image tensors packed so far."""
        self.packed_bytes = 0
        """Bytes of all messages packed so far, including images."""
        self.named: dict[str, PromptImage] = {}
        """Images at this end, by the keys in messages."""
        self._crossed: set[str] = set()
        """Keys of the images that both ends hold."""
        self._forget = False

    def pack(self, message: object) -> bytes:
        """Encode a message, with the images that the other end needs and does not hold.

        The other end needs all images of a message, but of shared arguments only the images that the share lists.
        """
        encoded = _encode(message)
        shared = [share.arguments.encoded for share in encoded.shares]
        self.named |= {key: image for part in (*shared, encoded) for key, image in part.images.items()}
        needed = encoded.images.keys() | {key for share in encoded.shares for key in share.images}
        new = {key: self.named[key] for key in needed - self._crossed}
        header = _Header(images=new, forget=self._forget, num_shared=len(shared))
        packed = io.BytesIO()
        # dumped straight into the buffer: dumping to bytes first would copy all pixels once more
        pickle.dump(header, packed, pickle.HIGHEST_PROTOCOL)
        packed.writelines(part.body for part in (*shared, encoded))
        self._forget = False
        self._crossed |= new.keys()
        self.image_bytes += sum(image.num_bytes for image in new.values())
        self.packed_bytes += packed.tell()
        return packed.getvalue()

    def unpack(self, data: bytes) -> Any:
        """Decode a message of the other end.

        Images whose pixels were not sent arrive without tensors, or as this end's own images if their keys are known.
        """
        stream = io.BytesIO(data)
        # only processes of the same run can send a message: over an inherited pipe, a socket in a folder that no other
        # user can enter (cluster.torchrun), or Ray's connections, which need a token (cluster.ray_token)
        header: _Header = pickle.load(stream)
        if header.forget:
            self._free()
        self.named |= header.images
        self._crossed |= header.images.keys()
        shared = [_Unpickler(stream, self.named).load() for _ in range(header.num_shared)]
        return _Unpickler(stream, self.named, shared).load()

    def forget(self) -> None:
        """Free all images here now, and at the other end with the next message; later messages send them again.

        No message with images may be on its way from the other end.
        """
        self._free()
        self._forget = True

    def _free(self) -> None:
        self.named.clear()
        self._crossed.clear()


class SharedArguments(tuple[Any, ...]):
    """Arguments of a call on several workers, encoded once for all messages; they must not change meanwhile."""

    @cached_property
    def encoded(self) -> _Encoded:
        return _encode(tuple(self))


@dataclass(frozen=True, slots=True)
class Share:
    """Shared arguments for one worker: a tuple, with the pixels of the images that this worker needs."""

    arguments: SharedArguments
    images: AbstractSet[str]
    """Keys of the images whose pixels the worker needs."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Encoded:
    """A pickle with references in place of images, and indices into `shares` in place of shared arguments."""

    body: bytes
    images: dict[str, PromptImage]
    """The images, by key, whose tensors are in this process."""
    shares: list[Share]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    images: dict[str, PromptImage]
    """Images, by key, that the receiver needs and does not hold yet."""
    forget: bool
    """True if the receiver has to free the images of earlier messages first."""
    num_shared: int
    """Number of pickled shared arguments between this header and the message that refers to them."""


def _encode(message: object) -> _Encoded:
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(message)
    return _Encoded(body=stream.getvalue(), images=pickler.images, shares=pickler.shares)


class _Pickler(pickle.Pickler):
    """Writes references in place of images and shared arguments, which it collects."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self.images: dict[str, PromptImage] = {}
        self.shares: list[Share] = []

    def persistent_id(self, value: object) -> Reference | int | None:
        if isinstance(value, PromptImage):
            if value.tensors:
                self.images[value.key] = value
            return value.key, value.num_tokens, value.grid
        if isinstance(value, Share):
            self.shares.append(value)
            return len(self.shares) - 1
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, stream: io.BytesIO, images: Mapping[str, PromptImage], shared: Sequence[tuple[Any, ...]] = ()
    ) -> None:
        super().__init__(stream)
        self._images = images
        self._shared = shared

    def persistent_load(self, reference: Reference | int) -> PromptImage | tuple[Any, ...]:
        if isinstance(reference, int):
            return self._shared[reference]
        key, num_tokens, grid = reference
        return self._images.get(key) or PromptImage(key=key, tensors={}, num_tokens=num_tokens, grid=grid)
