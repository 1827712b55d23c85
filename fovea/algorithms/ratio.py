"""Ratios of probabilities from their logarithms."""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp overflows past 88; a ratio anywhere near e^20 is a mismatch that the metrics show."""


def clamp_log(log_ratios: Tensor) -> Tensor:
    """At most +-20; no gradient beyond."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratios(log_ratios: Tensor) -> Tensor:
    """e to the clamped log ratios, of the same shape."""
    return clamp_log(log_ratios).exp()
