"""The distribution that completions are sampled from: temperature, then probability 0 for banned token ids.

Engine and trainer both turn logits into log-probs here, so that both use the same distribution. Log-probs over the
whole vocabulary would let a policy move probability to tokens that are never sampled, and nothing would move it back.
An engine needs the log-prob of only one token per row, for which `sampling_weights_` makes fewer passes over the
vocabulary; `sampling_logprobs_` is the slow reference.

Axes: `B` rows, `W` vocabulary, `K` banned ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.errors import TrainError


def sampling_logprobs_(logits_BW: Tensor, temperature: float | Tensor, banned_K: Tensor) -> Tensor:
    """Log-probs [B, W] at `temperature` (a number or [B, 1]), -inf at banned ids; overwrites the float32 logits."""
    assert logits_BW.dtype == torch.float32, f"log-probs of logits in {logits_BW.dtype}"
    if isinstance(temperature, Tensor) or temperature != 1:
        logits_BW /= temperature
    return logits_BW.index_fill_(1, banned_K, -torch.inf).log_softmax(dim=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingWeights:
    """Unnormalised probabilities and their logarithms."""

    relative_BW: Tensor
    """Logits divided by the temperature, minus the row's largest."""
    weights_BW: Tensor
    """Exponentials of `relative_BW`; 0 at banned ids."""
    total_B1: Tensor

    def logprobs(self, tokens_B: Tensor) -> Tensor:
        """Log-probs [B] of one token of each row."""
        return (self.relative_BW.gather(1, tokens_B[:, None]) - self.total_B1.log())[:, 0]


def sampling_weights_(logits_BW: Tensor, temperature: float | Tensor, banned_K: Tensor) -> SamplingWeights:
    """The distribution of `sampling_logprobs_` as unnormalised weights; overwrites the float32 logits."""
    assert logits_BW.dtype == torch.float32, f"log-probs of logits in {logits_BW.dtype}"
    if isinstance(temperature, Tensor) or temperature != 1:
        logits_BW /= temperature
    peak_B1 = logits_BW.index_fill_(1, banned_K, -torch.inf).amax(dim=1, keepdim=True)
    # exponents are at most 0, so no exponential overflows
    relative_BW = logits_BW.sub_(peak_B1)
    weights_BW = torch.exp(relative_BW)
    total_B1 = weights_BW.sum(dim=1, keepdim=True)
    return SamplingWeights(relative_BW=relative_BW, weights_BW=weights_BW, total_B1=total_B1)


def banned_mass(banned_logits_BK: Tensor, logsumexp_B: Tensor) -> Tensor:
    """Probability [B] of all banned ids under a softmax over the vocabulary; `logsumexp_B` is that of the other ids."""
    return torch.sigmoid(banned_logits_BK.logsumexp(dim=-1) - logsumexp_B)


def check_can_be_sampled(token_ids: NDArray[np.int64], banned_ids: Sequence[int], where: str) -> None:
    """TrainError if one of the tokens is banned: its log-prob would be -inf, and the loss infinite."""
    found = token_ids[np.isin(token_ids, banned_ids)]
    if len(found):
        raise TrainError(
            f"{where} holds token id {int(found[0])}, which is never sampled (Processor.banned_ids: special "
            "tokens, and ids beyond the tokenizer), so its log-prob is -inf; remove the token, or mask it"
        )
