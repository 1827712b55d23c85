"""Sampling of tokens: top-k, top-p and min-p, then the inverse CDF at uniform numbers from the request's seed.

`inverse_cdf` searches a large vocabulary in two levels, first for a block of tokens, then within it, so that only the
block sums and one block per row are accumulated; `inverse_cdf_plain` accumulates everything and is its slow reference.

Axes: `B` rows of the decode batch, `W` vocabulary, `K` banned ids, `J` blocks of the vocabulary, `X` tokens of
a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.models.sampling_distribution import SamplingWeights, sampling_weights_
from fovea.models.transfer import to_device
from fovea.types import Sampling

BELOW_ONE = float(np.nextafter(1.0, 0.0))
LOWEST_TEMPERATURE = 1e-6
"""Lowest temperature that is used; logits divided by a much lower one would overflow float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSettings:
    """Sampling settings as tensors, one entry per row."""

    temperature_B1: Tensor
    """Temperature; 1 in greedy rows."""
    greedy_B: Tensor
    top_k_B1: Tensor
    """Top-k; infinite if it is off."""
    top_p_B1: Tensor
    min_p_B1: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingNeeds:
    """Operations that at least one row of the batch needs; the others are skipped."""

    needs_temperature: bool
    """True if a sampled row has a temperature other than 1."""
    needs_truncation: bool
    """True if a row uses top-k, top-p or min-p, which need a sort of the vocabulary."""
    has_greedy: bool
    has_sampled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Inputs for sampling the next token of every row."""

    uniform_B: Tensor
    """Uniform numbers in [0, 1), float64."""
    settings: RowSettings
    needs: SamplingNeeds
    banned_K: Tensor


def row_settings(samplings: Sequence[Sampling], device: torch.device) -> RowSettings:
    """Build the sampling settings of a batch, with one row per entry."""

    def column(values: list[float]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.float32), device)[:, None]

    return RowSettings(
        temperature_B1=column([max(s.temperature, LOWEST_TEMPERATURE) if s.temperature else 1.0 for s in samplings]),
        greedy_B=to_device(torch.tensor([s.temperature == 0 for s in samplings]), device),
        top_k_B1=column([s.top_k or torch.inf for s in samplings]),
        top_p_B1=column([s.top_p for s in samplings]),
        min_p_B1=column([s.min_p for s in samplings]),
    )


def needs_of(samplings: Sequence[Sampling]) -> SamplingNeeds:
    """Determine the operations that a batch with these settings needs."""
    return SamplingNeeds(
        needs_temperature=any(s.temperature not in (0, 1) for s in samplings),
        needs_truncation=any(s.top_k or s.top_p < 1 or s.min_p for s in samplings),
        has_greedy=any(s.temperature == 0 for s in samplings),
        has_sampled=any(s.temperature != 0 for s in samplings),
    )


def uniforms(seed: int, n: int, num_tokens: int) -> NDArray[np.float64]:
    """Uniform numbers [n, num_tokens] in [0, 1) that depend only on the arguments.

    Philox is counter-based (Salmon et al., SC11): every seed gives an independent stream without set-up cost.
    """
    return np.random.Generator(np.random.Philox(key=seed)).random((n, num_tokens))


def sample_tokens(logits_BW: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
    """Sample tokens [B]; returns them with their log-probs [B] at the temperature, before top-k, top-p and min-p.

    Log-probs are normalized over the ids that are not banned (`sampling_weights_`, which overwrites the logits). With
    float32 logits, a token's probability is exact to float32 rounding.
    """
    temperature = draw.settings.temperature_B1 if draw.needs.needs_temperature else 1.0
    sampled = sampling_weights_(logits_BW, temperature, draw.banned_K)
    tokens_B = _choose(sampled, draw)
    return tokens_B, sampled.logprobs(tokens_B)


def _choose(sampled: SamplingWeights, draw: Draw) -> Tensor:
    """Choose the argmax in greedy rows, and a sampled token in the others."""
    if not draw.needs.has_sampled:
        # truncation never removes the likeliest token; among the weights, near ties could round to equal values
        likeliest_B: Tensor = sampled.relative_BW.argmax(dim=-1)
        return likeliest_B
    weights_BW = sampled.weights_BW
    if draw.needs.needs_truncation:
        weights_BW = weights_BW.masked_fill(~kept_tokens(sampled.relative_BW, draw.settings), 0.0)
    sampled_B: Tensor = inverse_cdf(weights_BW, draw.uniform_B)
    if not draw.needs.has_greedy:
        return sampled_B
    return torch.where(draw.settings.greedy_B, sampled.relative_BW.argmax(dim=-1), sampled_B)


def inverse_cdf(probs_BW: Tensor, uniform_B: Tensor) -> Tensor:
    """Inverse CDF: the token [B] into whose interval each uniform number falls; never a token of probability 0.

    The probabilities of a row need not sum to 1.
    """
    vocabulary = probs_BW.shape[1]
    # a block size near the square root of the vocabulary size makes both levels about equally long
    size = 2 ** math.ceil(math.log2(vocabulary) / 2)
    block_B1, within_B1 = _find(_block_sums(probs_BW, size), uniform_B[:, None])
    # the last block may extend past the vocabulary, where probabilities are 0
    token_BX = block_B1 * size + torch.arange(size, device=probs_BW.device)
    inside_BX = token_BX < vocabulary
    probs_BX = probs_BW.gather(1, token_BX.clamp(max=vocabulary - 1)) * inside_BX
    token_B1: Tensor = block_B1 * size + _find(probs_BX, within_B1)[0]
    return token_B1[:, 0].clamp(max=vocabulary - 1)


def _block_sums(probs_BW: Tensor, size: int) -> Tensor:
    """Sums of blocks of the vocabulary [B, J]; the last block may be short."""
    whole = probs_BW.shape[1] // size * size
    sums_BJ: Tensor = probs_BW[:, :whole].unflatten(1, (-1, size)).sum(dim=-1)
    if whole == probs_BW.shape[1]:
        return sums_BJ
    return torch.cat([sums_BJ, probs_BW[:, whole:].sum(dim=-1, keepdim=True)], dim=1)


def _find(weights_BX: Tensor, uniform_B1: Tensor) -> tuple[Tensor, Tensor]:
    """Search a CDF: returns the interval [B, 1] of each number, and its relative position within it, in [0, 1)."""
    # in float64, u < 1 implies u * total < total, so that the interval exists and is not empty; NaN gives the last
    # interval, and the engine rejects such a completion when it has finished
    cumulative_BX = weights_BX.double().cumsum(dim=-1)
    # scaled by the total, which may differ from 1
    level_B1 = uniform_B1 * cumulative_BX[:, -1:]
    found_B1 = torch.searchsorted(cumulative_BX, level_B1, right=True).clamp(max=weights_BX.shape[1] - 1)
    end_B1 = cumulative_BX.gather(1, found_B1)
    length_B1 = weights_BX.gather(1, found_B1).double()
    # rounding in the sum of a long row may put the position in a tiny interval slightly outside of [0, 1)
    return found_B1, (1 - (end_B1 - level_B1) / length_B1).clamp(0, BELOW_ONE)


def inverse_cdf_plain(probs_BW: Tensor, uniform_B: Tensor) -> Tensor:
    """Inverse CDF over the whole vocabulary at once: the slow reference for `inverse_cdf`, for tests."""
    return _find(probs_BW, uniform_B[:, None])[0][:, 0]


def kept_tokens(logits_BW: Tensor, settings: RowSettings) -> Tensor:
    """Mask of the tokens that remain after top-k, then top-p over the remaining ones, then min-p."""
    sorted_BW, order_BW = logits_BW.sort(dim=-1, descending=True, stable=True)
    rank_W = torch.arange(logits_BW.shape[1], device=logits_BW.device)
    keep_BW = rank_W < settings.top_k_B1
    probs_BW = sorted_BW.masked_fill(~keep_BW, -torch.inf).softmax(dim=-1)
    # a token stays if all likelier ones together have less than top_p, which keeps the smallest set with that mass
    keep_BW &= (probs_BW.cumsum(dim=-1) - probs_BW) < settings.top_p_B1
    keep_BW &= probs_BW >= settings.min_p_B1 * probs_BW[:, :1]
    # a top_p that is 0 in float32 would leave no token
    keep_BW[:, 0] = True
    return torch.zeros_like(keep_BW).scatter(1, order_BW, keep_BW)
