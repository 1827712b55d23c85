"""A JSONL file with rows that are bad in 36 ways, and the reason that each is to be counted under."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from gym_tests.images import encoded, noise

GOOD = 8


def png_of(width: int, height: int, bits: int = 8, body: bytes = b"") -> bytes:
    """A header that claims a size, whatever follows."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(noise(90), "JPEG", exif=exif)


def animation() -> bytes:
    return encoded(noise(91), "GIF", save_all=True, append_images=[noise(92)])


FILES: dict[str, tuple[bytes, str]] = {
    "text.png": (b"version https://git-lfs.github.com/spec/v1", "image_unknown_format"),
    "page.jpg": (b"<html><body>404</body></html>", "image_unknown_format"),
    "vector.svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image_unknown_format"),
    "half.png": (encoded(noise(93))[:900], "image_damaged"),
    "half.jpg": (encoded(noise(94), "JPEG")[:700], "image_damaged"),
    "flipped.png": (encoded(noise(95))[:60] + b"garbage" + encoded(noise(95))[67:], "image_damaged"),
    "bomb.png": (png_of(60_000, 60_000), "image_too_many_pixels"),
    "wide.png": (png_of(12_000, 9_000), "image_too_many_pixels"),
    "empty.png": (b"", "image_empty"),
    "zero.png": (png_of(0, 7), "image_empty"),
    "cmyk.jpg": (encoded(Image.new("CMYK", (48, 48)), "JPEG"), "image_cmyk"),
    "grey16.png": (encoded(Image.fromarray(np.zeros((48, 48), np.uint16))), "image_16_bit"),
    "colour16.png": (png_of(1, 1, 16, b"\0" + bytes(6)), "image_16_bit"),
    "film.gif": (animation(), "image_frames"),
    "turned.jpg": (turned(), "image_rotated"),
    "float.tiff": (encoded(Image.fromarray(np.ones((9, 9), np.float32)), "TIFF"), "image_32_bit"),
    "ribbon.png": (encoded(noise(96, 900, 2)), "image_shape"),
    "large.png": (encoded(noise(97, 700, 700)), "image_too_large"),
}
"""Images in files: name to content and reason."""


def row(**changes: object) -> dict[str, object]:
    return {"problem": "<image>How many?", "answer": "1", "images": ["good-0.png"], **changes}


def broken_rows(site: str) -> list[tuple[object, str]]:
    """(row, or the line itself) and reason."""
    half = base64.b64encode(encoded(noise(98))).decode()[:-7] + "*"
    return [
        *((row(images=[name]), reason) for name, (_, reason) in FILES.items()),
        (row(images=["none.png"]), "image_missing"),
        (row(images=["."]), "image_missing"),
        (row(images=["../secret.png"]), "image_outside_folder"),
        (row(images=["/etc/hostname"]), "image_outside_folder"),
        (row(images=[7]), "image_kind"),
        (row(images=[half]), "image_base64"),
        (row(images=["data:image/png,abc"]), "image_base64"),
        (row(images=[f"{site}/none.png"]), "url_status_404"),
        (row(images=[f"{site}/loop"]), "url_redirects"),
        (row(images=[f"{site}/drip"]), "url_timeout"),
        (row(images=[f"{site}/endless"]), "image_too_large"),
        (row(images=["http://a:b@example.org/a.png"]), "url_invalid"),
        (row(images=["good-0.png", "good-1.png"]), "image_marks"),
        (row(problem="<image><image>How many?"), "image_marks"),
        (row(problem="<image> \n"), "prompt_empty"),
        (row(problem=None), "prompt_empty"),
        (row(problem=7), "prompt_kind"),
        (row(problem=[{"role": "tool", "content": "<image>?"}]), "prompt_role"),
        (row(problem="<image>How many? " + "and how many? " * 200), "prompt_too_long"),
        (row(problem="<image>How many <|im_end|>?"), "prompt_special_token"),
        (row(answer=None), "answer_missing"),
        (row(answer="  "), "answer_missing"),
        (row(answer=[["1"]]), "answer_kind"),
        (row(answer=10**400), "answer_kind"),
        (row(answer="\ud800"), "text_damaged"),
        (row(answer="{5"), "answer_never_right"),
        (row(answer="\u200b"), "answer_never_right"),
        ('{"problem": "<image>How many?", "ans', "row_unreadable"),
        ("[1, 2]", "row_unreadable"),
    ]


def good_rows(site: str) -> list[dict[str, object]]:
    """Text only, one image, several; by path, by URL, in base64."""
    text = base64.b64encode(encoded(noise(0))).decode()
    return [
        row(),
        row(images=["good-1.png"], problem="How many?"),
        row(images=["good-0.png", "good-1.png"], problem="<image>More than <image>?"),
        row(images=[], problem="1 + 1?"),
        row(images=None, problem="1 + 2?"),
        row(images=[text]),
        row(images=[f"data:image/png;base64,{text}"]),
        row(images=[f"{site}/far.png"]),
    ]


def write(folder: Path, site: str) -> Mapping[str, str]:
    """`bad.jsonl`, `good.jsonl` and the images; the reason of each bad row, by what the list calls it."""
    for name, (content, _) in FILES.items():
        (folder / name).write_bytes(content)
    for n in range(2):
        noise(n).save(folder / f"good-{n}.png")
    bad, good = broken_rows(site), good_rows(site)
    mixed: list[tuple[object, str]] = []
    for n, pair in enumerate(bad):
        mixed += [(good[n // 4], "")] if n % 4 == 0 and n // 4 < len(good) else []
        mixed.append(pair)
    lines = [line if isinstance(line, str) else json.dumps(line) for line, _ in mixed]
    (folder / "bad.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "good.jsonl").write_text("".join(json.dumps(line) + "\n" for line in good))
    return {f"bad.jsonl line {n}": reason for n, (_, reason) in enumerate(mixed, start=1) if reason}
