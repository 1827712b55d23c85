"""The lines of metrics.jsonl: one JSON object per step, null for NaN and infinity."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fovea_gym.errors import DataError
from fovea_gym.utils.files import from_json_number

if TYPE_CHECKING:  # it imports numpy, which the parent process of a supervised run does not need
    from fovea.types import Metrics

METRICS_FILE = "metrics.jsonl"
BESIDE_STEPS = ("checkpoint", "checkpoint_write")
"""Names of phases that are not part of `seconds/step`."""
PART_OF_SYNC = "push"
"""A time that is part of a phase's time, and so is not counted separately."""


def parse_metrics(line: str, *, where: str) -> Metrics:
    """Parse the metrics in a line, `step` first; DataError, with `where`, for anything else."""
    try:
        row = {key: from_json_number(value) for key, value in json.loads(line).items()}
        return {"step": float(int(row.pop("step")))} | row
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{where} is {line[:60]!r}, which is not a JSON object of numbers with a step; delete that line"
        ) from error
