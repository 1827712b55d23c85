"""Every kind of image file becomes the RGB picture a viewer would show, or one line that says why not."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageOps

from fovea_gym.errors import BadRowError, DataError
from fovea_gym.rows.images import ImageOpener
from fovea_gym.types import Conversion, ImageRef
from gym_tests.bad_files import png_of
from gym_tests.images import encoded
from gym_tests.tables import table

WHERE = "train.parquet row 12, image 1"


def open_bytes(content: bytes, *, max_mib: float = 32, max_megapixels: float = 64) -> Image.Image:
    """With every conversion that there is."""
    limits = {"max_image_mib": max_mib, "max_image_megapixels": max_megapixels}
    return ImageOpener(**limits, convert_images=get_args(Conversion))(ImageRef(source=content, where=WHERE))  # type: ignore[arg-type]


def opened(source: Any, *convert_images: Conversion) -> Image.Image:
    """Without a conversion but those."""
    opener = ImageOpener(max_image_mib=1, max_image_megapixels=1, convert_images=convert_images)
    return opener(ImageRef(source=source, where=WHERE))


def values(image: Image.Image) -> NDArray[np.uint8]:
    return np.asarray(image)


def colours(height: int = 5, width: int = 7) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


@table("kind", ["PNG", "BMP", "TIFF", "PPM"])
def test_bytes_path_and_values_open_alike(kind: str, tmp_path: Path) -> None:
    pixels = colours()
    content = encoded(Image.fromarray(pixels), kind)
    (tmp_path / "a.bin").write_bytes(content)
    for source in (content, str(tmp_path / "a.bin"), pixels):
        image = opened(source)
        assert image.mode == "RGB"
        np.testing.assert_array_equal(values(image), pixels)


@table("kind", ["JPEG", "WEBP", "JPEG2000"])
def test_lossy_formats_open(kind: str) -> None:
    image = open_bytes(encoded(Image.new("RGB", (32, 16), (200, 60, 30)), kind))
    assert image.size == (32, 16)
    np.testing.assert_allclose(values(image)[8, 16], (200, 60, 30), atol=6)


def test_alpha_is_flattened_on_white() -> None:
    rgba = np.zeros((1, 3, 4), dtype=np.uint8)
    rgba[0, :, 3] = (255, 51, 0)
    shown = values(open_bytes(encoded(Image.fromarray(rgba))))
    np.testing.assert_array_equal(shown[0, :, 0], (0, 204, 255))
    grey = Image.fromarray(rgba[..., 2:].copy(), "LA")
    np.testing.assert_array_equal(values(open_bytes(encoded(grey))), shown)


def test_noise_below_full_transparency_is_white() -> None:
    """Editors leave any colours where nothing is seen; half of the picture is opaque, and stays."""
    noise = np.random.default_rng(3).integers(0, 256, (16, 16, 4), dtype=np.uint8)
    noise[..., 3] = np.where(np.arange(16) < 8, 0, 255)
    seen = np.where(noise[..., 3:] == 0, 255, noise[..., :3])
    for kind in ("PNG", "TIFF"):
        np.testing.assert_array_equal(values(open_bytes(encoded(Image.fromarray(noise), kind))), seen)
    grey = values(open_bytes(encoded(Image.fromarray(noise[..., 2:].copy(), "LA"))))
    np.testing.assert_array_equal(grey, np.repeat(seen[..., 2:], 3, axis=2))


def test_opaque_alpha_changes_nothing_and_a_transparent_colour_is_white() -> None:
    image = Image.fromarray(colours())
    np.testing.assert_array_equal(values(open_bytes(encoded(image.convert("RGBA")))), values(image))
    palette = Image.new("P", (2, 1))
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.putpixel((1, 0), 1)
    assert values(open_bytes(encoded(palette))).tolist() == [[[255, 0, 0], [0, 0, 255]]]
    assert values(open_bytes(encoded(palette, transparency=1))).tolist() == [[[255, 0, 0], [255, 255, 255]]]
    image = Image.fromarray(np.array([[0, 9]], dtype=np.uint8))
    assert values(open_bytes(encoded(image, transparency=0)))[0, :, 0].tolist() == [255, 9]


@table("kind", ["PNG", "TIFF", "PPM"])
def test_sixteen_bit_grey_is_scaled(kind: str) -> None:
    wide = np.array([[0, 257, 32768, 65535]], dtype=np.uint16)
    shown = values(open_bytes(encoded(Image.fromarray(wide), kind)))
    assert shown[0, :, 0].tolist() == [0, 1, 128, 255]
    assert shown.shape == (1, 4, 3)


def test_cmyk() -> None:
    shown = open_bytes(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "TIFF"))
    assert values(shown)[4, 4].tolist() == [255, 0, 0]
    assert open_bytes(encoded(Image.new("CMYK", (8, 8)), "JPEG")).mode == "RGB"


@table("kind", ["GIF", "PNG", "WEBP"])
def test_first_frame_of_an_animation(kind: str) -> None:
    red, blue = Image.new("RGB", (8, 8), (255, 0, 0)), Image.new("RGB", (8, 8), (0, 0, 255))
    options = {"lossless": True} if kind == "WEBP" else {}
    content = encoded(red, kind, save_all=True, append_images=[blue], **options)
    np.testing.assert_allclose(values(open_bytes(content))[4, 4], (255, 0, 0), atol=1)


@table("orientation", range(1, 9))
@table("kind", ["PNG", "TIFF"])
def test_exif_rotation_is_applied_once(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(Image.fromarray(colours()), kind, exif=exif)
    shown = open_bytes(content)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    np.testing.assert_array_equal(values(shown), values(expected))
    np.testing.assert_array_equal(values(ImageOps.exif_transpose(shown)), values(shown))
    assert shown.size == ((5, 7) if orientation > 4 else (7, 5))


def turned(kind: str) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(Image.fromarray(colours()), kind, exif=exif)


@table("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_it_is_known_whether_an_image_is_turned(kind: str) -> None:
    opener = ImageOpener(max_image_mib=1, max_image_megapixels=1)
    upright, pillows = encoded(Image.fromarray(colours()), kind), Image.open(io.BytesIO(turned(kind)))
    assert opener.is_turned(ImageRef(source=turned(kind)))
    assert opener.is_turned(ImageRef(source=pillows))
    assert not opener.is_turned(ImageRef(source=upright))
    assert not opener.is_turned(ImageRef(source=colours()))
    with pytest.raises(BadRowError, match="megapixels"):
        ImageOpener(max_image_mib=1, max_image_megapixels=1e-6).is_turned(ImageRef(source=turned(kind)))


RED = struct.pack(">3H", 65535, 0, 0)
SIXTEEN_BIT_COLOURS = [
    png_of(1, 1, 16, b"\0" + RED),
    b"P6 1 1 65535\n" + RED,
    b"P3 # of\r1 1 65535\n65535 0 0\n",
]
"""One red pixel as PNG, PPM and plain PPM, by hand: Pillow writes none, and reads them as 8 bits."""
CONVERTIBLE = {
    "cmyk": [encoded(Image.new("CMYK", (8, 8)), "JPEG"), encoded(Image.new("CMYK", (8, 8)), "TIFF")],
    "16_bit": [
        *(encoded(Image.fromarray(np.zeros((4, 4), np.uint16)), kind) for kind in ("PNG", "TIFF", "JPEG2000")),
        *SIXTEEN_BIT_COLOURS,
        b"P2 1 1 65535\n65535\n",
    ],
    "frames": [
        encoded(Image.new("RGB", (8, 8)), kind, save_all=True, append_images=[Image.new("RGB", (8, 8), (9, 9, 9))])
        for kind in ("GIF", "PNG", "WEBP", "TIFF")
    ],
    "rotated": [turned(kind) for kind in ("JPEG", "PNG", "WEBP", "TIFF")],
}


@pytest.mark.parametrize("kind", CONVERTIBLE)
def test_what_needs_a_conversion_is_refused_until_it_is_asked_for(kind: Conversion) -> None:
    assert CONVERTIBLE.keys() == set(get_args(Conversion))
    for content in CONVERTIBLE[kind]:
        with pytest.raises(BadRowError, match=rf"image 1: the image .*, add {kind} to convert_images$") as error:
            opened(content)
        assert error.value.reason == f"image_{kind}"
        assert opened(content, kind).mode == "RGB"


def test_sixteen_bit_colours_become_eight() -> None:
    for content in SIXTEEN_BIT_COLOURS:
        assert values(open_bytes(content)).tolist() == [[[255, 0, 0]]]


def test_a_second_small_picture_in_a_photo_is_no_film() -> None:
    photo = encoded(Image.fromarray(colours()), "MPO", save_all=True, append_images=[Image.new("RGB", (2, 2))])
    assert opened(photo).size == (7, 5)


def test_a_picture_of_pillow_is_checked_like_any_other(tmp_path: Path) -> None:
    picture = Image.fromarray(colours())
    np.testing.assert_array_equal(values(opened(picture)), colours())
    (tmp_path / "half.png").write_bytes(encoded(Image.fromarray(colours(64, 64)))[:3000])
    lazy = Image.open(tmp_path / "half.png")
    with pytest.raises(DataError, match=r"the image is damaged"):
        opened(lazy)
    with pytest.raises(DataError, match=r"above max_image_megapixels"):
        opened(Image.new("1", (2000, 2000)))


def test_bomb_is_refused_from_its_header() -> None:
    with pytest.raises(DataError) as error:
        open_bytes(png_of(9000, 9000))
    assert str(error.value) == (
        f"{WHERE}: the image is 9000x9000 pixels (81.0 megapixels), above max_image_megapixels=64; "
        "shrink the image, raise the limit"
    )
    with pytest.raises(DataError, match="Pillow refuses it"):
        open_bytes(png_of(60000, 60000))
    assert Image.MAX_IMAGE_PIXELS == 89478485


def test_large_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    with path.open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(DataError, match=r"1024\.0 MiB, above max_image_mib=32; shrink the image, raise"):
        ImageOpener(max_image_mib=32, max_image_megapixels=64)(ImageRef(source=str(path)))
    with pytest.raises(DataError, match=r"above max_image_mib=0\.001"):
        open_bytes(b"x" * 2000, max_mib=0.001)


@table("kind", ["PNG", "JPEG", "GIF", "TIFF", "WEBP"])
def test_half_a_file_is_an_error(kind: str) -> None:
    content = encoded(Image.fromarray(colours(64, 64)), kind)
    with pytest.raises(DataError, match=r"row 12, image 1: .*; replace the file$"):
        open_bytes(content[: len(content) // 2])


@table(
    ("content", "reason", "problem"),
    [
        (b"", "image_empty", "the file is empty (0 bytes)"),
        (png_of(0, 5), "image_empty", "the image is empty (0x5 pixels)"),
        (b"not an image, a text", "image_unknown_format", "the content is not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "image_unknown_format", "with pixels in a known format"),
        (png_of(9000, 9000), "image_too_many_pixels", "9000x9000"),
        (png_of(9, 9, body=b"short"), "image_damaged", "the image is damaged"),
        *(
            (encoded(Image.fromarray(np.ones((2, 2), dtype)), "TIFF"), "image_32_bit", "pixels are 32-bit numbers")
            for dtype in (np.int32, np.float32)
        ),
    ],
)
def test_what_is_no_image(content: bytes, reason: str, problem: str) -> None:
    with pytest.raises(BadRowError) as error:
        open_bytes(content)
    assert error.value.reason == reason
    assert problem in str(error.value)
    assert str(error.value).startswith(f"{WHERE}: ")


def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "pointer.png").write_text("version https://git-lfs.github.com/spec/v1")
    for path, problem in [
        (str(tmp_path / "pointer.png"), r"pointer\.png\): the content is not an image"),
        (str(tmp_path / "none.png"), "no such image file; correct the path in the row$"),
        (str(tmp_path), "is not a regular file"),
        ("a\0b", "the file cannot be read"),
        ("x" * 5000, "the file cannot be read"),
        # without a fetcher nothing is read from the network
        *((url, r"is not on this machine; download it") for url in ("https://a.org/b.png", "s3://bucket/b.png")),
    ]:
        with pytest.raises(DataError, match=problem):
            opened(path)


@table(
    ("shape", "dtype", "problem"),
    [
        ((4, 4, 4), np.uint8, r"an array of uint8 with shape \[4, 4, 4\] is not an RGB picture"),
        ((4, 4, 3), np.float32, r"an array of float32"),
        ((4, 4), np.uint8, r"shape \[4, 4\]"),
        ((0, 4, 3), np.uint8, r"the image is empty \(4x0 pixels\)"),
        ((1001, 1000, 3), np.uint8, r"1000x1001 pixels \(1\.0 megapixels\), above"),
    ],
)
def test_arrays_that_are_no_picture(shape: tuple[int, ...], dtype: type, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        opened(np.zeros(shape, dtype))


SEEDS = [encoded(Image.fromarray(colours(9, 9)), kind) for kind in ("PNG", "JPEG", "GIF", "TIFF", "WEBP", "BMP")]


@pytest.mark.filterwarnings("ignore::UserWarning:PIL.*")
@settings(max_examples=300, deadline=None)
@given(
    content=st.sampled_from(SEEDS),
    edits=st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), min_size=1, max_size=8),
)
def test_damaged_files_open_or_are_a_data_error(content: bytes, edits: list[tuple[float, int]]) -> None:
    damaged = bytearray(content)
    for place, value in edits:
        damaged[int(place * len(damaged))] = value
    try:
        assert open_bytes(bytes(damaged), max_megapixels=1).mode == "RGB"
    except DataError as error:
        assert str(error).startswith(WHERE)  # noqa: PT017 (most files open)


def with_scans(count: int) -> bytes:
    """A progressive JPEG whose last scan comes this many times more."""
    content = encoded(Image.fromarray(colours(64, 64)), "JPEG", progressive=True)
    last = content.rindex(b"\xff\xda")
    return content[:last] + content[last:-2] * count + b"\xff\xd9"


def with_chunks(count: int) -> bytes:
    """A PNG with this many empty chunks of an unknown name."""
    empty = struct.pack(">I", 0) + b"abCd" + struct.pack(">I", zlib.crc32(b"abCd"))
    content = encoded(Image.fromarray(colours()))
    return content[:33] + empty * count + content[33:]


def with_segments(count: int, segment: bytes = b"\xff\xe1\x00\x02") -> bytes:
    content = encoded(Image.fromarray(colours()), "JPEG")
    return content[:2] + segment * count + content[2:]


def with_pages(count: int) -> bytes:
    pages = [Image.new("L", (1, 1))] * count
    return encoded(pages[0], "TIFF", save_all=True, append_images=pages[1:])


SIDES = ("width", "height", "tile_width", "tile_height")


def jpeg2000(**changed: int) -> bytes:
    """A JPEG 2000 code stream whose marker of the sizes has other values."""
    content = encoded(Image.fromarray(colours(16, 16)), "JPEG2000", no_jp2=True)
    places = {"width": (8, 4), "height": (12, 4), "tile_width": (24, 4), "tile_height": (28, 4), "components": (40, 2)}
    for name, value in changed.items():
        place, size = places[name]
        content = content[:place] + value.to_bytes(size) + content[place + size :]
    return content


@table(
    ("content", "problem"),
    [
        (with_scans(200), "more than 100 scans"),
        (with_chunks(2_500_000), "chunks"),
        (with_segments(100_000), "more than 10000 segments"),
        (with_segments(5_000_000, b"\xff"), "more than 10000 segments"),
        (with_pages(1200), "more than 1000 pages"),
        (jpeg2000(**dict.fromkeys(SIDES, 7000)), "decoding JPEG 2000 of 7000x7000 pixels takes 1122 MiB, above 732"),
        (jpeg2000(width=60_000, height=60_000, tile_width=1, tile_height=1), "tiles"),
        (jpeg2000(components=16_384), "has 16384 components"),
        (encoded(Image.fromarray(colours()), "JPEG2000") + jpeg2000(components=5), "has 5 components"),
    ],
)
def test_a_picture_that_costs_more_than_its_pixels_is_refused_unopened(content: bytes, problem: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Image, "open", lambda *_args, **_options: pytest.fail("it was opened"))
        with pytest.raises(BadRowError, match=problem) as error:
            open_bytes(content)
    assert error.value.reason == "image_too_costly"


def test_scans_chunks_pages_and_tiles_of_usual_files_are_no_matter() -> None:
    for content in (
        with_scans(50),
        # a phone's picture with a film behind it, whose bytes may be anything
        with_scans(3) + b"\xff\xda\0\2" * 300,
        with_chunks(100),
        with_segments(20),
        with_segments(9, b"\xff"),
        with_pages(9),
        jpeg2000(),
        jpeg2000(tile_width=16),
    ):
        assert open_bytes(content).size


def test_a_picture_one_pixel_wide_is_refused() -> None:
    for size in ((1, 64_000_000), (64_000_000, 1)):
        with pytest.raises(BadRowError, match=r"and a side may have at most 100000") as error:
            open_bytes(png_of(*size))
        assert error.value.reason == "image_shape"
