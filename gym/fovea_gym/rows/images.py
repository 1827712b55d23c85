"""Opening images: every source becomes a fully decoded RGB picture or a BadRowError.

The size of a file is checked before it is read, and the number of pixels in its header before they are decoded (a file
of 40 kB can claim a gigapixel), as are other costs of decoding (`image_cost`). Transparent pixels are shown on white.
Nothing is repaired: half a file is an error, not half an image, and an image that needs a conversion is refused unless
`convert_images` names the conversion. The default names one: photos are rotated by their EXIF orientation.
"""

from __future__ import annotations

import base64
import io
import re
import stat
import struct
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from fovea_gym.errors import BadRowError
from fovea_gym.rows.image_cost import MAX_SIDE_PX, costly
from fovea_gym.types import Conversion, ImageRef

Fetch: TypeAlias = Callable[[str, str], bytes]
"""A function of a URL and the image's name in errors, which returns the content of the URL."""
OpenImage: TypeAlias = Callable[[ImageRef], Image.Image]
"""A function that opens an image: an `ImageOpener`, or a stand-in."""
Size: TypeAlias = tuple[int, int]
"""Width and height of an image in pixels."""


# Pillow also opens formats that start other programs (EPS starts Ghostscript) or do not hold a single picture.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000")
# Exceptions that Pillow's decoders raise on broken content, found with half a million mutated files.
_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    ArithmeticError,
    RuntimeError,
    struct.error,
    zlib.error,
)
_BOMB = (Image.DecompressionBombError, Image.DecompressionBombWarning)
_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_MAY_HOLD_ORIENTATION = re.compile(rb"exif|xmp", re.IGNORECASE)
"""Checked in PNG files first, since Pillow decodes all pixels to look for an orientation that may follow them."""
_BITS_TAG = 258
# the SIZ marker of a JPEG 2000 code stream, and the offset from it to the bits of the first channel
_JPEG2000_SIZES, _JPEG2000_BITS = b"\xff\x4f\xff\x51", 42
_CONVERSION_PROBLEMS: dict[Conversion, str] = {
    "cmyk": "has colours for printing (CMYK), which look different on every screen",
    "16_bit": "has more than 8 bits per channel, which is more than the model sees",
    "frames": "has several frames or pages, and the row does not say which of them is meant",
    "rotated": "is stored turned or mirrored, with a note (EXIF) on how to show it",
}
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|data:")


def no_fetch(url: str, where: str) -> bytes:
    """Refuse every URL: the `fetch` of an opener that reads nothing from the network."""
    raise _refused(where, f"{url[:200]} is not on this machine", "download it", "url_unreachable")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOpener:
    """Reads, checks and decodes images, or only their headers; raises BadRowError naming `ref.where`."""

    max_image_mib: float
    """Maximum size of a file."""
    max_image_megapixels: float
    convert_images: Collection[Conversion] = ()
    """Conversions to make; an image that needs another one is refused."""
    fetch: Fetch = no_fetch
    section: str = ""
    """Prefix of these settings in errors: `data.` if a recipe sets them."""

    def __call__(self, ref: ImageRef) -> Image.Image:
        """The image as RGB, with its file closed and the reference's `change` applied."""
        image = self._opened(ref)
        return image if ref.change is None else Image.fromarray(ref.change(np.asarray(image)))

    def _opened(self, ref: ImageRef) -> Image.Image:
        if isinstance(ref.source, np.ndarray):
            self._check_values(ref.source, ref.where)
            return Image.fromarray(np.ascontiguousarray(ref.source))
        if isinstance(ref.source, Image.Image):
            with _broken_is_bad(ref.where):
                return self._checked(ref.source, b"", ref.where)
        with self._header(ref) as (image, content, where):
            return self._checked(image, content, where)

    def size(self, ref: ImageRef) -> Size:
        """The size in an image's header; no pixel is decoded.

        It is the size as stored, before any EXIF rotation, which does not change the number of pixels or visual tokens.
        """
        if isinstance(ref.source, np.ndarray):
            self._check_values(ref.source, ref.where)
            return ref.source.shape[1], ref.source.shape[0]
        if isinstance(ref.source, Image.Image):
            self._check_pixels(*ref.source.size, ref.where)
            return ref.source.size
        with self._header(ref) as (image, _, where):
            self._check_pixels(*image.size, where)
            return image.size

    def is_turned(self, ref: ImageRef) -> bool:
        """True if the EXIF orientation of an image rotates or mirrors it."""
        if isinstance(ref.source, np.ndarray):
            return False
        if isinstance(ref.source, Image.Image):
            return bool(_turned(ref.source))
        with self._header(ref) as (image, content, where):
            self._check_pixels(*image.size, where)
            may_hold = image.format != "PNG" or _MAY_HOLD_ORIENTATION.search(content) is not None
            return may_hold and bool(_turned(image))

    def _check_values(self, values: NDArray[np.uint8], where: str) -> None:
        if values.dtype != np.uint8 or values.ndim != 3 or values.shape[2] != 3:
            raise _refused(
                where,
                f"an array of {values.dtype} with shape {list(values.shape)} is not an RGB picture",
                "give uint8 values of shape [height, width, 3]",
                "image_kind",
            )
        height, width = values.shape[:2]
        self._check_pixels(width, height, where)

    def _check_pixels(self, width: int, height: int, where: str) -> None:
        if not (width and height):
            raise _refused(where, f"the image is empty ({width}x{height} pixels)", "replace it", "image_empty")
        if max(width, height) > MAX_SIDE_PX:
            problem = f"the image is {width}x{height} pixels, and a side may have at most {MAX_SIDE_PX}"
            raise _refused(where, problem, "cut the image", "image_shape")
        megapixels = width * height / 1e6
        if megapixels > self.max_image_megapixels:
            raise _refused(
                where,
                f"the image is {width}x{height} pixels ({megapixels:.1f} megapixels), above "
                f"{self.section}max_image_megapixels={self.max_image_megapixels:g}",
                "shrink the image, raise the limit",
                "image_too_many_pixels",
            )

    def _checked(self, image: Image.Image, content: bytes, where: str) -> Image.Image:
        """The image as RGB; BadRowError for too many pixels, or for a conversion that the settings do not allow."""
        self._check_pixels(*image.size, where)
        needed = _conversions(image, content) | _turned(image)  # before load(), which rotates a TIFF and drops its tag
        image.load()
        needed |= _turned(image)  # in some formats the tag is at the end of the file
        for kind in sorted(needed - set(self.convert_images)):
            raise _refused(
                where,
                f"the image {_CONVERSION_PROBLEMS[kind]}",
                f"convert the file, add {kind} to {self.section}convert_images",
                f"image_{kind}",
            )
        turn = _UPRIGHT.get(image.getexif().get(_ORIENTATION_TAG, 1))
        return _to_rgb(image if turn is None else image.transpose(turn), where)

    @contextmanager
    def _header(self, ref: ImageRef) -> Iterator[tuple[Image.Image, bytes, str]]:
        """An encoded image with only its header read, the content of its file, and its name in errors.

        BadRowError if the file is too large, or if decoding it would cost more than its pixels.
        """
        assert isinstance(ref.source, str | bytes), f"{ref.where} is {type(ref.source).__name__}, which is not encoded"
        where, content, limit = ref.where, ref.source, f"{self.section}max_image_mib"
        if isinstance(content, str):
            where = f"{ref.where} ({content[:200]})"
            is_remote = is_url(content)
            content = self.fetch(content, where) if is_remote else _read(content, where, self.max_image_mib, limit)
        check_bytes(len(content), where, self.max_image_mib, limit)
        if (problem := costly(content, self.max_image_megapixels)) is not None:
            raise _refused(where, problem, "save the image again", "image_too_costly")
        with _broken_is_bad(where, content), Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            yield image, content, where


def is_url(path: str) -> bool:
    """True if a path is a URL or a data URI rather than a file of this machine."""
    return _URL.match(path) is not None


def png_url(image: Image.Image) -> str:
    """A picture as a PNG data URI, the form that chat endpoints accept."""
    png = io.BytesIO()
    image.save(png, "PNG")
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode("ascii")


def _refused(where: str, problem: str, fix: str, reason: str) -> BadRowError:
    return BadRowError(f"{where}: {problem}", reason, fix)


def no_such_image(where: str) -> BadRowError:
    """The error for a row whose image file is missing."""
    return _refused(where, "no such image file", "correct the path in the row", "image_missing")


def _read(path: str, where: str, max_mib: float, setting: str) -> bytes:
    try:
        status = Path(path).stat()
        if not stat.S_ISREG(status.st_mode):
            raise _refused(where, "is not a regular file", "give the path of an image", "image_missing")
        check_bytes(status.st_size, where, max_mib, setting)
        return Path(path).read_bytes()
    except FileNotFoundError as error:
        raise no_such_image(where) from error
    except BadRowError:
        raise
    except (OSError, ValueError) as error:
        fix = "correct the path or its permissions"
        raise _refused(where, f"the file cannot be read ({error})", fix, "image_missing") from error


def check_bytes(num_bytes: int, where: str, max_mib: float, setting: str) -> None:
    """Raise BadRowError for an image file larger than `max_mib`; `setting` is the name of this limit."""
    mib = num_bytes / 2**20
    if mib > max_mib:
        raise _refused(
            where,
            f"the file has {mib:.1f} MiB, above {setting}={max_mib:g}",
            "shrink the image, raise the limit",
            "image_too_large",
        )


@contextmanager
def _broken_is_bad(where: str, content: bytes = b"") -> Iterator[None]:
    """Convert Pillow's errors on broken content to BadRowError."""
    try:
        yield
    except UnidentifiedImageError as error:
        problem, reason = _why_unknown(content)
        raise _refused(where, problem, "replace the file", reason) from error
    except _BOMB as error:
        fix = "shrink the image"
        raise _refused(where, f"Pillow refuses it ({error})", fix, "image_too_many_pixels") from error
    except BadRowError:
        raise
    except _BROKEN as error:
        kind = type(error).__name__
        problem = f"the image is damaged ({kind}: {error})"
        raise _refused(where, problem, "replace the file", "image_damaged") from error


def _conversions(image: Image.Image, content: bytes) -> set[Conversion]:
    """Conversions that an image needs to become 8-bit RGB, according to its header."""
    needed: set[Conversion] = set()
    # a phone's photo often holds a second, smaller one (MPO), which does not count as a frame
    if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
        needed.add("frames")
        image.seek(0)
    if image.mode == "CMYK":
        needed.add("cmyk")
    if image.mode.startswith("I;16") or 8 < _bits_per_channel(image, content) <= 16:
        needed.add("16_bit")
    return needed


def _turned(image: Image.Image) -> set[Conversion]:
    return {"rotated"} if image.getexif().get(_ORIENTATION_TAG, 1) in _UPRIGHT else set()


def _bits_per_channel(image: Image.Image, content: bytes) -> int:
    """Bits per channel of the stored image, according to its header."""
    # Pillow silently reads 16-bit colours as 8-bit ones
    if isinstance(image, TiffImageFile):
        bits: tuple[int, ...] = image.tag_v2.get(_BITS_TAG, (8,))
        return max(bits)
    if image.format == "PNG":
        return int.from_bytes(content[24:25])
    if image.format == "PPM" and content[:2] in {b"P2", b"P3", b"P5", b"P6"}:
        fields = re.sub(rb"#[^\r\n]*", b"", content[2:512]).split(None, 3)
        return int(fields[2]).bit_length()
    if image.format == "JPEG2000" and content:
        return (content[content.index(_JPEG2000_SIZES) + _JPEG2000_BITS] & 0x7F) + 1
    return 8


def _why_unknown(content: bytes) -> tuple[str, str]:
    """The problem with a file that Pillow does not recognise, and the reason under which it is counted."""
    if not content:
        return "the file is empty (0 bytes)", "image_empty"
    if content[:8] == b"\x89PNG\r\n\x1a\n" and len(content) >= 24:
        width, height = struct.unpack(">II", content[16:24])
        if not (width and height):
            return f"the image is empty ({width}x{height} pixels)", "image_empty"
    known = ", ".join(_FORMATS)
    return f"the content is not an image with pixels in a known format ({known})", "image_unknown_format"


def _to_rgb(image: Image.Image, where: str) -> Image.Image:
    if image.mode.startswith(("I", "F")):
        image = _grey_to_8_bit(image, where)
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image.convert("RGBA"))
    rgb = image.convert("RGB")
    rgb.info = {}  # an EXIF rotation left here could be applied a second time by other code
    return rgb


def _grey_to_8_bit(image: Image.Image, where: str) -> Image.Image:
    """16-bit grey (0 black, 65535 white) as 8-bit grey; BadRowError for other wide modes, whose white is unknown."""
    if not (image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM")):
        raise _refused(
            where,
            f"pixels are 32-bit numbers (Pillow mode {image.mode}), and their value for white is unknown",
            "save the image with 8 or 16 bits",
            "image_32_bit",
        )
    values = np.asarray(image).astype(np.uint32)
    grey = Image.fromarray(((values + 128) // 257).astype(np.uint8))
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    return grey
