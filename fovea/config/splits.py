"""Settings of the splits of a data set in files, common to all environments that read rows."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fovea.config.base import NonNegativeInt, Section


class SplitFiles(Section):
    """Files of the three splits, or the share of the training rows that serves as dev."""

    train_files: tuple[str, ...]
    """Rows to train on: files (Parquet, JSONL, JSON, CSV; also at s3://, gs://, https://), folders, name@split."""
    test_files: tuple[str, ...]
    """Rows held out for the test readings; nothing is steered by them."""
    dev_files: tuple[str, ...] | None = None
    """Rows of the dev readings, which steer; default: dev_share of the training rows, which are then not trained on."""
    dev_share: Annotated[float, Field(ge=0, le=0.5)] = 0.05
    """Share of the training rows that is held out for dev, by image, where dev_files is not set; 0: no dev rows."""
    dev_seed: NonNegativeInt = 0
    """Random seed of that choice; apart from `seed`, so that runs with other seeds have the same dev rows."""

    @property
    def has_dev(self) -> bool:
        return self.dev_files is not None or self.dev_share > 0
