"""The distribution that completions are drawn from: temperature, then probability 0 for banned token ids.

Engine and trainer turn logits into log-probs here and nowhere else, so that both are of one distribution. A log-prob of
the whole vocabulary would let a policy move probability to tokens that are never drawn, and nothing would pull it back.

Axes: `B` rows, `W` vocabulary, `K` banned ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.errors import TrainError


def drawn_logprobs_(logits_BW: Tensor, temperature: float | Tensor, banned_K: Tensor) -> Tensor:
    """Log-probs [B, W] at `temperature`, one number or [B, 1], with -inf at banned ids.

    The float32 logits are overwritten by the scaled and masked ones.
    """
    assert logits_BW.dtype == torch.float32, f"log-probs of logits in {logits_BW.dtype}"
    if isinstance(temperature, Tensor) or temperature != 1:
        logits_BW /= temperature
    return logits_BW.index_fill_(1, banned_K, -torch.inf).log_softmax(dim=-1)


def banned_mass(banned_logits_BK: Tensor, logit_B: Tensor, logprob_B: Tensor) -> Tensor:
    """Probability [B] that a softmax over the whole vocabulary gives to the banned ids together.

    `logit_B` and `logprob_B` are those of any token that may be drawn: their difference is the logarithm of the sum of
    exponentials over all such tokens, so that no second pass over the vocabulary is needed.
    """
    return torch.sigmoid(banned_logits_BK.logsumexp(dim=-1) - (logit_B - logprob_B))


def check_drawable(token_ids: NDArray[np.int64], banned_ids: Sequence[int], where: str) -> None:
    """TrainError if one of the tokens is banned: its log-prob would be -inf, and so would be a loss on it."""
    found = token_ids[np.isin(token_ids, banned_ids)]
    if len(found):
        raise TrainError(
            f"{where} holds token id {int(found[0])}, which completions never hold (Processor.banned_ids: special "
            "tokens, and ids beyond the tokenizer), so that its log-prob is -inf; take it out, or mask it"
        )
