"""The distribution that completions are sampled from: temperature, then probability 0 for banned token ids.

Engine and trainer turn logits into log-probs here and nowhere else, so that both are of one distribution. A log-prob of
the whole vocabulary would let a policy move probability to tokens that are never sampled, and nothing would pull it back.
An engine needs the log-prob of one token per row only, for which `sampling_weights_` passes over the vocabulary fewer
times; `sampling_logprobs_` is its slow twin.

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
    """Log-probs [B, W] at `temperature`, one number or [B, 1], with -inf at banned ids.

    The float32 logits are overwritten by the scaled and masked ones.
    """
    assert logits_BW.dtype == torch.float32, f"log-probs of logits in {logits_BW.dtype}"
    if isinstance(temperature, Tensor) or temperature != 1:
        logits_BW /= temperature
    return logits_BW.index_fill_(1, banned_K, -torch.inf).log_softmax(dim=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingWeights:
    """Probabilities before they are divided by their sum, and their logarithms."""

    relative_BW: Tensor
    """Logits at the temperature, less the largest of the row."""
    weights_BW: Tensor
    """Their exponentials; 0 at banned ids."""
    total_B1: Tensor

    def logprobs(self, tokens_B: Tensor) -> Tensor:
        """Log-probs [B] of one token of each row."""
        return (self.relative_BW.gather(1, tokens_B[:, None]) - self.total_B1.log())[:, 0]


def sampling_weights_(logits_BW: Tensor, temperature: float | Tensor, banned_K: Tensor) -> SamplingWeights:
    """The distribution of `sampling_logprobs_` as weights; the float32 logits are overwritten by the relative ones."""
    assert logits_BW.dtype == torch.float32, f"log-probs of logits in {logits_BW.dtype}"
    if isinstance(temperature, Tensor) or temperature != 1:
        logits_BW /= temperature
    peak_B1 = logits_BW.index_fill_(1, banned_K, -torch.inf).amax(dim=1, keepdim=True)
    # exponents of 0 at most, so that no exponential overflows
    relative_BW = logits_BW.sub_(peak_B1)
    weights_BW = torch.exp(relative_BW)
    total_B1 = weights_BW.sum(dim=1, keepdim=True)
    return SamplingWeights(relative_BW=relative_BW, weights_BW=weights_BW, total_B1=total_B1)


def banned_mass(banned_logits_BK: Tensor, logsumexp_B: Tensor) -> Tensor:
    """Probability [B] that a softmax over the whole vocabulary gives to the banned ids together.

    `logsumexp_B` are the logarithms of the sums of exponentials over all ids that are not banned.
    """
    return torch.sigmoid(banned_logits_BK.logsumexp(dim=-1) - logsumexp_B)


def check_can_be_sampled(token_ids: NDArray[np.int64], banned_ids: Sequence[int], where: str) -> None:
    """TrainError if one of the tokens is banned: its log-prob would be -inf, and so would be a loss on it."""
    found = token_ids[np.isin(token_ids, banned_ids)]
    if len(found):
        raise TrainError(
            f"{where} holds token id {int(found[0])}, which completions never hold (Processor.banned_ids: special "
            "tokens, and ids beyond the tokenizer), so that its log-prob is -inf; take it out, or mask it"
        )
