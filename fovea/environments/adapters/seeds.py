"""Seeds as rows: the seeds of one split are in no other."""

from __future__ import annotations

from fovea.environments.base import Split

FIRST_SEED: dict[Split, int] = {"train": 0, "dev": 1 << 24, "test": 1 << 25}
"""The seed of a split's first row; splits have at most 2**24 rows (`config.environments.SeedRows`)."""
