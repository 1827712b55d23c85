"""Ratios of probabilities from their logarithms, and sums over completions that are packed one after the other.

`lengths` has the number of actions of each completion, in order; a completion of none has the sum and the mean 0.

Axes: `A` actions of all completions, `S` completions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp overflows past 88; a ratio anywhere near e^20 is a mismatch that the metrics show."""


def clamp_log(log_ratios: Tensor) -> Tensor:
    """At most +-20; no gradient beyond."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratios(log_ratios: Tensor) -> Tensor:
    """e to the clamped log ratios, of the same shape."""
    return clamp_log(log_ratios).exp()


def sequence_sums(x_A: Tensor, lengths: Sequence[int]) -> Tensor:
    """[S], the sum over each completion. Raises RuntimeError unless the lengths add up to A."""
    parts = x_A.split(list(lengths))
    return torch.stack([part.sum() for part in parts]) if parts else x_A.new_zeros(0)


def sequence_means(x_A: Tensor, lengths: Sequence[int]) -> Tensor:
    """[S], the mean over each completion."""
    return sequence_sums(x_A, lengths) / torch.tensor(lengths, device=x_A.device).clamp(min=1)


def spread(x_S: Tensor, lengths: Sequence[int]) -> Tensor:
    """[A], for each action the value of its completion."""
    return x_S.repeat_interleave(torch.tensor(lengths, device=x_S.device, dtype=torch.long))
