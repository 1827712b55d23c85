"""Importance ratios from log ratios, and segment sums over completions that are packed back to back.

`lengths` is the number of action tokens of each completion, in order; an empty completion has sum and mean 0.

Axes: `A` action tokens of all completions, `S` completions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# exp overflows float32 beyond 88; a ratio near e^20 is an engine mismatch, which the mismatch/* metrics show
MAX_LOG_RATIO = 20.0


def clamp_log(log_ratios: Tensor) -> Tensor:
    """Log ratios clamped to +-20; the gradient is 0 beyond these limits."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratios(log_ratios: Tensor) -> Tensor:
    """Importance ratios: exp of the clamped log ratios, elementwise."""
    return clamp_log(log_ratios).exp()


def sequence_sums(x_A: Tensor, lengths: Sequence[int]) -> Tensor:
    """Sum over each completion's tokens, [S]. Raises RuntimeError unless the lengths add up to A."""
    parts = x_A.split(list(lengths))
    return torch.stack([part.sum() for part in parts]) if parts else x_A.new_zeros(0)


def sequence_means(x_A: Tensor, lengths: Sequence[int]) -> Tensor:
    """Mean over each completion's tokens, [S]."""
    parts = x_A.split(list(lengths))
    # divided by Python numbers: a tensor of lengths would have to be copied to the device
    return torch.stack([part.sum() / max(len(part), 1) for part in parts]) if parts else x_A.new_zeros(0)


def spread(x_S: Tensor, lengths: Sequence[int]) -> Tensor:
    """Per-completion values repeated for each token of the completion, [A]."""
    # `repeat_interleave` would make the host wait for the size of its result
    parts = [x.expand(length) for x, length in zip(x_S.unbind(), lengths, strict=True)]
    return torch.cat(parts) if parts else x_S
