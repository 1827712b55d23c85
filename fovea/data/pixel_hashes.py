"""Hashes of the pixels of images, kept on disk between runs, since decoding a photograph takes about 20 ms."""

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
    """A function from an image to a hash of its size and pixels, which does not open images whose hash is known.

    The key is the content of an encoded image; the path, size and modification time of a file; or the text of a URL.
    """

    def __init__(self, connect: Callable[[], sqlite3.Connection], open_image: OpenImage, salt: str) -> None:
        """`salt` describes how images are opened, since other conversions give other pixels."""
        self._connect = connect
        self._open_image = open_image
        self._salt = f"{PIL.__version__} {salt}".encode()
        self._num_new = 0

    def __call__(self, ref: ImageRef) -> bytes:
        """The hash of an image; DataError if the image cannot be opened."""
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
        if self._num_new % _COMMIT_EVERY == 0:  # commit often: until then the writer locks out other runs
            database.commit()
        return made

    def _key(self, source: object) -> bytes | None:
        """Cache key of an image; None for pixels in memory, which are cheap to hash."""
        if isinstance(source, str):
            content = source.encode(errors="replace") if is_url(source) else _state_of(Path(source))
        elif isinstance(source, bytes):
            content = source
        else:
            return None
        return None if content is None else hashlib.blake2b(self._salt + b"\0" + content, digest_size=16).digest()


@contextmanager
def pixel_hashes(folder: Path, open_image: OpenImage, salt: str) -> Iterator[PixelHashes]:
    """The hashes kept in `folder`, which is created on first use; DataError if they cannot be kept there."""
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
    except (OSError, ValueError):  # opening the file will raise an error that says what is wrong
        return None
    return f"{path.absolute()} {status.st_size} {status.st_mtime_ns}".encode(errors="replace")
