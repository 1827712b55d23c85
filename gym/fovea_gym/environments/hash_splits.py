"""Splits of generated rows: the hash of a row's content decides its split, so that no content is in two splits."""

from __future__ import annotations

import hashlib

import numpy as np

from fovea_gym.environments.base import Split

_STREAMS: dict[Split, int] = {"train": 0, "dev": 1, "test": 2}
_HELD_OUT_SEED = 2024


def split_of(content: bytes) -> Split:
    """The only split that may hold a row with this content; dev and test each get a tenth of all content."""
    bucket = hashlib.md5(content, usedforsecurity=False).digest()[0] % 10
    return "test" if bucket == 0 else "dev" if bucket == 1 else "train"


def row_generator(seed: int, split: Split, index: int) -> np.random.Generator:
    """A random number generator for one row; for dev and test it does not depend on the seed."""
    return np.random.default_rng([seed if split == "train" else _HELD_OUT_SEED, _STREAMS[split], index])
