"""Splits of drawn rows: the hash of what a row shows decides its split, so that nothing is in two of them."""

from __future__ import annotations

import hashlib

import numpy as np

from fovea_gym.environments.base import Split

_STREAMS: dict[Split, int] = {"train": 0, "dev": 1, "test": 2}
_HELD_OUT_SEED = 2024


def split_of(content: bytes) -> Split:
    """The only split in which a row with this content may be: a tenth each for dev and test."""
    bucket = hashlib.md5(content, usedforsecurity=False).digest()[0] % 10
    return "test" if bucket == 0 else "dev" if bucket == 1 else "train"


def row_generator(seed: int, split: Split, index: int) -> np.random.Generator:
    """Random numbers of one row; those of dev and test do not depend on the seed."""
    return np.random.default_rng([seed if split == "train" else _HELD_OUT_SEED, _STREAMS[split], index])
