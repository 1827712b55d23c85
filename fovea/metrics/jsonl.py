"""The lines of metrics.jsonl: one JSON object per step, null for NaN and infinity."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from pydantic import FiniteFloat, TypeAdapter, ValidationError

from fovea_gym.errors import DataError

if TYPE_CHECKING:  # it imports numpy, which the parent process of a supervised run does not need
    from fovea.types import Metrics

METRICS_FILE = "metrics.jsonl"
BESIDE_STEPS = ("checkpoint", "checkpoint_write")
"""Names of phases that are not part of `seconds/step`."""

_FINITE = TypeAdapter(dict[str, FiniteFloat | None])
_NUMBERS = TypeAdapter(dict[str, float | None])


def parse_metrics(line: str, *, where: str) -> Metrics:
    """Parse the metrics in a line, `step` first; DataError, with `where`, for anything else."""
    try:
        row = {name: math.nan if value is None else value for name, value in _numbers(line).items()}
        return {"step": float(int(row.pop("step")))} | row
    except (ValueError, KeyError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{where} is {line[:60]!r}, which is not a JSON object of numbers with a step; delete that line"
        ) from error


def _numbers(line: str) -> dict[str, float | None]:
    try:
        return _FINITE.validate_json(line)
    # Python's own reader, five times slower, also reads lone surrogates in a name, and no huge number as infinity
    except ValidationError:
        return _NUMBERS.validate_python(json.loads(line))
