"""Log-probs and entropies of actions from hidden states, with few passes over tensors [actions, vocabulary].

They are of the distribution that completions are sampled from (`sampling_distribution`).

Axes: `A` actions, `E` width of the model, `W` vocabulary, `K` banned ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fovea.models.head_gradients import LossGradients, Scores, gradient_of_logits_, gradients_of_head, scores_by_chunks
from fovea.models.sampling_distribution import banned_mass, sampling_logprobs_
from fovea.models.torch_versions import fsdp_output


@fsdp_output
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Log-probs, entropies and values of the actions of a packed row, in float32."""

    logprobs_A: Tensor
    entropies_A: Tensor
    banned_mass_A: Tensor
    """Probability of all banned ids together in the softmax over the whole vocabulary; without a gradient."""
    values_A: Tensor | None = None
    """Values of the states before the actions; None without a value head."""

    def at(self, index_A: Tensor) -> TokenScores:
        """The scores of the actions at these indices, some of them several times."""
        return TokenScores(
            logprobs_A=self.logprobs_A[index_A],
            entropies_A=self.entropies_A[index_A],
            banned_mass_A=self.banned_mass_A[index_A],
            values_A=None if self.values_A is None else self.values_A[index_A],
        )


def token_scores(
    hidden_AE: Tensor,
    head_WE: Tensor,
    targets_A: Tensor,
    banned_K: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    loss_gradients: LossGradients | None = None,
) -> TokenScores:
    """Log-probs and entropies at `temperature`, with logits for `chunk_tokens` actions at a time.

    The log-prob of a banned target is -inf (`sampling_distribution.check_can_be_sampled`). With the `loss_gradients` of the loss
    whose backward pass will follow, the logits of several chunks are computed once instead of twice.
    """

    def of_chunk(hidden_AE: Tensor, targets_A: Tensor) -> Scores:
        scores: Scores = LogprobAndEntropy.apply(hidden_AE, head_WE, targets_A, banned_K, temperature)  # type: ignore[no-untyped-call]
        return scores

    logprobs_A, entropies_A, masses_A = scores_by_chunks(
        hidden_AE,
        head_WE,
        targets_A,
        distribute=partial(_Distributions.of, banned_K=banned_K, temperature=temperature),
        of_chunk=of_chunk,
        chunk_tokens=chunk_tokens,
        loss_gradients=loss_gradients,
    )
    return TokenScores(logprobs_A=logprobs_A, entropies_A=entropies_A, banned_mass_A=masses_A)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Distributions:
    """Softmax over the ids that are not banned."""

    probs_AW: Tensor
    weighted_AW: Tensor
    """p log p; 0 at banned ids."""
    logprobs_A: Tensor
    entropies_A: Tensor
    banned_mass_A: Tensor
    targets_A: Tensor
    temperature: float

    @staticmethod
    def of(
        hidden_AE: Tensor, head_WE: Tensor, targets_A: Tensor, banned_K: Tensor, temperature: float
    ) -> _Distributions:
        targets_A1 = targets_A[:, None]
        logits_AW = (hidden_AE @ head_WE.t()).float()
        banned_logits_AK = logits_AW[:, banned_K] / temperature
        logprobs_AW = sampling_logprobs_(logits_AW, temperature, banned_K)
        logprobs_A = logprobs_AW.gather(1, targets_A1)[:, 0]
        # of any token: logit - log-prob is the logarithm of the sum of exponentials, without a pass over the vocabulary
        masses_A = banned_mass(banned_logits_AK, logits_AW.gather(1, targets_A1)[:, 0] - logprobs_A)
        # two tensors [A, W] instead of four: p overwrites the logits, p log p the log-probs
        probs_AW = torch.exp(logprobs_AW, out=logits_AW)
        # 0 times -inf would be NaN
        logprobs_AW.index_fill_(1, banned_K, 0.0)
        weighted_AW = torch.mul(probs_AW, logprobs_AW, out=logprobs_AW)
        return _Distributions(
            probs_AW=probs_AW,
            weighted_AW=weighted_AW,
            logprobs_A=logprobs_A,
            entropies_A=-weighted_AW.sum(-1),
            banned_mass_A=masses_A,
            targets_A=targets_A,
            temperature=temperature,
        )

    @property
    def scores(self) -> Scores:
        return self.logprobs_A, self.entropies_A, self.banned_mass_A

    def gradient_(self, loss_gradients: Sequence[Tensor | None]) -> Tensor:
        return gradient_of_logits_(
            self.probs_AW,
            self.targets_A,
            self.entropies_A,
            loss_gradients,
            self.temperature,
            weighted_AW=self.weighted_AW,
        )


class LogprobAndEntropy(torch.autograd.Function):
    """log p(target) and entropy H = -sum p log p for p = softmax(h W' / temperature) over the ids that are not banned.

    A banned id has p = 0 and no gradient, and adds nothing to H, since 0 log 0 is 0.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_AE: Tensor, head_WE: Tensor, targets_A: Tensor, banned_K: Tensor, temperature: float
    ) -> Scores:
        found = _Distributions.of(hidden_AE, head_WE, targets_A, banned_K, temperature)
        ctx.save_for_backward(hidden_AE, head_WE, targets_A, found.probs_AW, found.entropies_A)
        ctx.temperature = temperature
        # an output that no loss uses has a gradient of None, so that its terms can be skipped, instead of zeros
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(found.banned_mass_A)
        return found.scores

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_AE, head_WE, targets_A, probs_AW, entropies_A = ctx.saved_tensors
        of_logits_AW = gradient_of_logits_(probs_AW, targets_A, entropies_A, gradients, ctx.temperature)
        return *gradients_of_head(ctx, hidden_AE, head_WE, of_logits_AW), None, None, None
