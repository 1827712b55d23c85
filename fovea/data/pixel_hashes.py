"""Hashes of the pixels of images, kept on disk between runs: decoding a photograph again takes some 20 ms."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from pathlib import Path

import PIL
from PIL.Image import Image

from fovea_gym.errors import DataError
from fovea_gym.rows.images import OpenImage, is_url
from fovea_gym.types import ImageRef

FILE = "pixel_hashes.sqlite"
_COMMIT_EVERY = 200


class PixelHashes:
    """A function from an image to a hash of its size and pixels, which opens no image whose hash it has.

    The key is the content of an encoded image; for a file its path, size and time; a URL stands for its content.
    """

    def __init__(self, connect: Callable[[], sqlite3.Connection], open_image: OpenImage, salt: str) -> None:
        """`salt` says how images are opened: other conversions give other pixels."""
        self._connect = connect
        self._open_image = open_image
        self._salt = f"{PIL.__version__} {salt}".encode()
        self._num_new = 0

    def __call__(self, ref: ImageRef) -> bytes:
        """The hash; DataError where the image cannot be opened."""
        key = self._key(ref.source)
        if key is None:
            return pixel_hash(self._open_image(ref))
        database = self._connect()
        found = database.execute("SELECT pixels FROM hashes WHERE content = ?", (key,)).fetchone()
        if found is not None:
            return bytes(found[0])
        made = pixel_hash(self._open_image(ref))
        database.execute("INSERT OR IGNORE INTO hashes VALUES (?, ?)", (key, made))
        self._num_new += 1
        if self._num_new % _COMMIT_EVERY == 0:  # a writer locks out other runs until then
            database.commit()
        return made

    def _key(self, source: object) -> bytes | None:
        """None for pixels in memory, of which a hash takes no time."""
        if isinstance(source, str):
            content = source.encode(errors="replace") if is_url(source) else _state_of(Path(source))
        elif isinstance(source, bytes):
            content = source
        else:
            return None
        return None if content is None else hashlib.blake2b(self._salt + b"\0" + content, digest_size=16).digest()


@contextmanager
def pixel_hashes(folder: Path, open_image: OpenImage, salt: str) -> Iterator[PixelHashes]:
    """The hashes kept in `folder`, made for the first image with a key; DataError where they cannot be kept there."""
    with ExitStack() as stack:

        @cache
        def connect() -> sqlite3.Connection:
            folder.mkdir(parents=True, exist_ok=True)
            database = stack.enter_context(closing(sqlite3.connect(folder / FILE, timeout=60)))
            database.execute("CREATE TABLE IF NOT EXISTS hashes (content BLOB PRIMARY KEY, pixels BLOB) WITHOUT ROWID")
            return stack.enter_context(database)

        try:
            yield PixelHashes(connect, open_image, salt)
        except sqlite3.Error as error:
            raise DataError(
                f"{folder / FILE} cannot be used ({error}); delete it, or set data.cache_dir to another folder"
            ) from error


def pixel_hash(image: Image) -> bytes:
    """A hash of the size and pixels of an image."""
    size = f"{image.width}x{image.height}".encode()
    return hashlib.blake2b(image.tobytes(), digest_size=16, person=size[:16]).digest()


def _state_of(path: Path) -> bytes | None:
    try:
        status = path.stat()
    except (OSError, ValueError):  # opening it says what is wrong
        return None
    return f"{path.absolute()} {status.st_size} {status.st_mtime_ns}".encode(errors="replace")
