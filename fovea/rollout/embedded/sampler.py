"""Drawing tokens: temperature, top-k, top-p, min-p, by inverse CDF from uniform numbers that belong to a request.

Axes: `B` rows, `W` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.types import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSettings:
    """Sampling settings of every row."""

    temperature_B1: Tensor
    """1 where greedy."""
    greedy_B: Tensor
    top_k_B1: Tensor
    """Infinite where off."""
    top_p_B1: Tensor
    min_p_B1: Tensor
    truncates: bool
    """Whether any row uses top-k, top-p or min-p: else the sort is spared."""


def row_settings(samplings: Sequence[Sampling], device: torch.device) -> RowSettings:
    """One row per entry."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

    return RowSettings(
        temperature_B1=column([s.temperature or 1.0 for s in samplings]),
        greedy_B=torch.tensor([s.temperature == 0 for s in samplings], device=device),
        top_k_B1=column([s.top_k or torch.inf for s in samplings]),
        top_p_B1=column([s.top_p for s in samplings]),
        min_p_B1=column([s.min_p for s in samplings]),
        truncates=any(s.top_k or s.top_p < 1 or s.min_p for s in samplings),
    )


def uniforms(seed: int, n: int, num_tokens: int) -> NDArray[np.float64]:
    """[n, num_tokens] numbers in [0, 1) that depend on these arguments alone.

    Philox is counter-based (Salmon et al., SC11): any seed gives an independent stream at no set-up cost.
    """
    return np.random.Generator(np.random.Philox(key=seed)).random((n, num_tokens))


def draw(logits_BW: Tensor, uniform_B: Tensor, settings: RowSettings, banned: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B] and their log-probs [B] at the temperature, before bans, top-k, top-p and min-p.

    `uniform_B` is float64, so that u * total < total holds for the sum of float32 probabilities.
    """
    logprobs_BW = torch.log_softmax(logits_BW / settings.temperature_B1, dim=-1)
    allowed_BW = logprobs_BW.index_fill(1, banned, -torch.inf)
    if settings.truncates:
        allowed_BW = allowed_BW.masked_fill(~_kept(allowed_BW, settings), -torch.inf)
    cumulative_BW = allowed_BW.double().exp().cumsum(dim=-1)
    level_B1 = uniform_B[:, None] * cumulative_BW[:, -1:]
    drawn_B = torch.searchsorted(cumulative_BW, level_B1, right=True)[:, 0]
    tokens_B = torch.where(settings.greedy_B, allowed_BW.argmax(dim=-1), drawn_B)
    return tokens_B, logprobs_BW.gather(1, tokens_B[:, None])[:, 0]


def _kept(logprobs_BW: Tensor, settings: RowSettings) -> Tensor:
    """True for the tokens that survive top-k, then top-p among those, and min-p."""
    sorted_BW, order_BW = logprobs_BW.sort(dim=-1, descending=True, stable=True)
    rank_W = torch.arange(logprobs_BW.shape[1], device=logprobs_BW.device)
    keep_BW = rank_W < settings.top_k_B1
    probs_BW = sorted_BW.masked_fill(~keep_BW, -torch.inf).softmax(dim=-1)
    # a token stays when the likelier ones do not yet reach top_p: the smallest set with that mass
    keep_BW &= (probs_BW.cumsum(dim=-1) - probs_BW) < settings.top_p_B1
    keep_BW &= probs_BW >= settings.min_p_B1 * probs_BW[:, :1]
    return torch.zeros_like(keep_BW).scatter(1, order_BW, keep_BW)
