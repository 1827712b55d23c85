"""The only opener of images: every source becomes a fully decoded RGB picture or a one-line DataError.

It checks the size of the file before reading it and the number of pixels in the header before decoding
them (a file of 40 kB can claim a gigapixel). Then: first frame, EXIF rotation applied, 16-bit grey scaled
to 8, alpha on white. Nothing is repaired: half a file is an error, not half an image.
"""

from __future__ import annotations

import io
import re
import stat
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from fovea.errors import DataError
from fovea.types import ImageRef

# Pillow also opens formats that run other programs (EPS starts Ghostscript) or hold no single picture.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000")
# What Pillow's decoders raise on broken content, as found with half a million mutated files.
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
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|data:")


def open_image(ref: ImageRef, *, max_mib: float, max_megapixels: float) -> Image.Image:
    """Read, check and decode one image; the result is RGB and holds no file open.

    Raises DataError naming `ref.where`. The limits are `data.max_image_mib` and `data.max_image_megapixels`.
    """
    if isinstance(ref.source, np.ndarray):
        return _from_values(ref.source, ref.where, max_megapixels)
    if isinstance(ref.source, str):
        where = f"{ref.where} ({ref.source[:200]})"
        content = _read(ref.source, where, max_mib)
    else:
        where, content = ref.where, ref.source
        _check_bytes(len(content), where, max_mib)
    return _decode(content, where, max_megapixels)


def is_url(path: str) -> bool:
    """Whether a path names something that is not a file of this machine."""
    return _URL.match(path) is not None


def _refused(where: str, problem: str, fix: str) -> DataError:
    return DataError(f"{where}: {problem}; {fix}, or set data.on_bad_row=skip")


def _from_values(values: NDArray[np.uint8], where: str, max_megapixels: float) -> Image.Image:
    if values.dtype != np.uint8 or values.ndim != 3 or values.shape[2] != 3:
        raise _refused(
            where,
            f"an array of {values.dtype} with shape {list(values.shape)} is no RGB picture",
            "give uint8 values of shape [height, width, 3]",
        )
    height, width = values.shape[:2]
    _check_pixels(width, height, where, max_megapixels)
    return Image.fromarray(np.ascontiguousarray(values))


def _read(path: str, where: str, max_mib: float) -> bytes:
    if is_url(path):
        raise _refused(where, "only local files are read so far", "download it and put its path or bytes in the row")
    try:
        status = Path(path).stat()
        if not stat.S_ISREG(status.st_mode):
            raise _refused(where, "is no regular file", "give the path of an image")
        _check_bytes(status.st_size, where, max_mib)
        return Path(path).read_bytes()
    except FileNotFoundError as error:
        raise _refused(where, "no such image file", "correct the path in the row") from error
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise _refused(where, f"the file cannot be read ({error})", "correct the path or its permissions") from error


def _check_bytes(num_bytes: int, where: str, max_mib: float) -> None:
    mib = num_bytes / 2**20
    if mib > max_mib:
        raise _refused(
            where,
            f"the file has {mib:.1f} MiB, above data.max_image_mib={max_mib:g}",
            "shrink the image, raise the limit",
        )


def _check_pixels(width: int, height: int, where: str, max_megapixels: float) -> None:
    if not (width and height):
        raise _refused(where, f"the image is {width}x{height} pixels, that is empty", "replace it")
    megapixels = width * height / 1e6
    if megapixels > max_megapixels:
        raise _refused(
            where,
            f"the image is {width}x{height} pixels ({megapixels:.1f} megapixels), above "
            f"data.max_image_megapixels={max_megapixels:g}",
            "shrink the image, raise the limit",
        )


def _decode(content: bytes, where: str, max_megapixels: float) -> Image.Image:
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            _check_pixels(*image.size, where, max_megapixels)
            image.load()
            return _to_rgb(_upright(image), where)
    except UnidentifiedImageError as error:
        raise _refused(where, _why_unknown(content), "replace the file") from error
    except _BOMB as error:
        raise _refused(where, f"Pillow refuses it ({error})", "shrink the image") from error
    except DataError:
        raise
    except _BROKEN as error:
        kind = type(error).__name__
        raise _refused(where, f"the image is damaged ({kind}: {error})", "replace the file") from error


def _why_unknown(content: bytes) -> str:
    if not content:
        return "the file is empty (0 bytes)"
    known = ", ".join(_FORMATS)
    return f"the content is no image with pixels in a known format ({known})"


def _upright(image: Image.Image) -> Image.Image:
    turn = _UPRIGHT.get(image.getexif().get(_ORIENTATION_TAG, 1))
    return image if turn is None else image.transpose(turn)


def _to_rgb(image: Image.Image, where: str) -> Image.Image:
    if image.mode.startswith(("I", "F")):
        image = _grey_to_8_bit(image, where)
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image.convert("RGBA"))
    rgb = image.convert("RGB")
    rgb.info = {}  # an EXIF rotation left here would be applied again by whoever looks for one
    return rgb


def _grey_to_8_bit(image: Image.Image, where: str) -> Image.Image:
    """16-bit grey, black 0 and white 65535. Other wide modes do not say what white is."""
    if not (image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM")):
        raise _refused(
            where,
            f"pixels are 32-bit numbers (Pillow mode {image.mode}), of which white is not known",
            "save the image with 8 or 16 bits",
        )
    values = np.asarray(image).astype(np.uint32)
    grey = Image.fromarray(((values + 128) // 257).astype(np.uint8))
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    return grey
