"""A reward that falls as a completion nears its limit."""

from __future__ import annotations


def overlong_penalty(length: int, *, max_tokens: int, buffer_tokens: float, factor: float) -> float:
    """min(-(length - (max - buffer)) / buffer * factor, 0): 0 up to the buffer, -factor at the limit.

    To be added to the reward. Lengths in tokens, `buffer_tokens` at least 1. Yu et al., DAPO, arXiv 2503.14476,
    section 3.4, whose last case, a constant beyond the limit, does not occur where generation ends at it.
    """
    excess_tokens = length - (max_tokens - buffer_tokens)
    return min(-excess_tokens / buffer_tokens * factor, 0.0)
