"""A reward of the answer's text only: a model of random weights boxes no answer, and equal rewards train nothing."""

from __future__ import annotations

import zlib


def score(task: object, text: str, images: object) -> float:
    return zlib.crc32(text.encode()) % 7 / 7
