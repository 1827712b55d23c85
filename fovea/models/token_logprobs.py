"""Log-probs and entropies of actions from hidden states, with few passes over tensors [actions, vocabulary].

They are of the distribution that completions are drawn from (`drawn_distribution`).

Axes: `A` actions, `E` width of the model, `W` vocabulary, `K` banned ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fovea.models.drawn_distribution import banned_mass, drawn_logprobs_


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
) -> TokenScores:
    """Log-probs and entropies at `temperature`, with logits for `chunk_tokens` actions at a time.

    The log-prob of a banned target is -inf (`drawn_distribution.check_drawable`).
    """
    # the probabilities of a chunk are recomputed in the backward pass: saved, they would take what chunking frees
    recompute = len(hidden_AE) > chunk_tokens and torch.is_grad_enabled()
    chunks = [
        _scores(hidden, head_WE, targets, banned_K, temperature, recompute)
        for hidden, targets in zip(hidden_AE.split(chunk_tokens), targets_A.split(chunk_tokens), strict=True)
    ]
    logprobs, entropies, masses = zip(*chunks, strict=True)
    return TokenScores(
        logprobs_A=torch.cat(logprobs), entropies_A=torch.cat(entropies), banned_mass_A=torch.cat(masses)
    )


Scores = tuple[Tensor, Tensor, Tensor]
"""Log-probs, entropies and banned mass, [A] each."""


def _scores(
    hidden: Tensor, head: Tensor, targets: Tensor, banned: Tensor, temperature: float, recompute: bool
) -> Scores:
    if recompute:
        scores: Scores = checkpoint(
            LogprobAndEntropy.apply, hidden, head, targets, banned, temperature, use_reentrant=False
        )
        return scores
    return LogprobAndEntropy.apply(hidden, head, targets, banned, temperature)  # type: ignore[no-any-return,no-untyped-call]


class LogprobAndEntropy(torch.autograd.Function):
    """log p(target) and entropy H = -sum p log p for p = softmax(h W' / temperature) over the ids that are not banned.

    With z the scaled logits: d log p(t) / dz = onehot(t) - p and dH / dz = -p (log p + H). A banned id has p = 0 and no
    gradient, and adds nothing to H, since 0 log 0 is 0.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_AE: Tensor, head_WE: Tensor, targets_A: Tensor, banned_K: Tensor, temperature: float
    ) -> Scores:
        targets_A1 = targets_A[:, None]
        logits_AW = (hidden_AE @ head_WE.t()).float()
        banned_logits_AK = logits_AW[:, banned_K] / temperature
        logprobs_AW = drawn_logprobs_(logits_AW, temperature, banned_K)
        logprobs_A = logprobs_AW.gather(1, targets_A1)[:, 0]
        masses_A = banned_mass(banned_logits_AK, logits_AW.gather(1, targets_A1)[:, 0], logprobs_A)
        # two tensors [A, W] instead of four: p overwrites the logits, p log p the log-probs; only p is saved
        probs_AW = torch.exp(logprobs_AW, out=logits_AW)
        # 0 times -inf would be NaN
        logprobs_AW.index_fill_(1, banned_K, 0.0)
        entropies_A = -torch.mul(probs_AW, logprobs_AW, out=logprobs_AW).sum(-1)
        ctx.save_for_backward(hidden_AE, head_WE, targets_A, probs_AW, entropies_A)
        ctx.temperature = temperature
        # an output that no loss uses has a gradient of None, so that its terms can be skipped, instead of zeros
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(masses_A)
        return logprobs_A, entropies_A, masses_A

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_AE, head_WE, targets_A, probs_AW, entropies_A = ctx.saved_tensors
        of_hidden, of_head = gradients_of_head(ctx, hidden_AE, head_WE, (probs_AW, targets_A, entropies_A), gradients)
        return of_hidden, of_head, None, None, None


def gradients_of_head(
    ctx: Any,
    hidden_AE: Tensor,
    head_WE: Tensor,
    scored: tuple[Tensor, Tensor, Tensor],
    gradients: Sequence[Tensor | None],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of hidden states and head where they are needed.

    `scored`: probabilities [A, W], which are overwritten, targets and entropies. `gradients`: those of log-probs and
    entropies.
    """
    of_logits_AW = _gradient_of_logits(*scored, *gradients[:2])
    if ctx.temperature != 1:
        of_logits_AW /= ctx.temperature
    of_logits_AW = of_logits_AW.to(hidden_AE.dtype)
    of_hidden = of_logits_AW @ head_WE if ctx.needs_input_grad[0] else None
    of_head = of_logits_AW.t() @ hidden_AE if ctx.needs_input_grad[1] else None
    return of_hidden, of_head


def _gradient_of_logits(
    probs_AW: Tensor,
    targets_A: Tensor,
    entropies_A: Tensor,
    of_logprobs_A: Tensor | None,
    of_entropies_A: Tensor | None,
) -> Tensor:
    """Gradient of the scaled logits [A, W]. Overwrites the probabilities."""
    # in place on a saved tensor: safe, since autograd refuses a second backward pass through a freed graph
    inner_AW = None
    if of_entropies_A is not None:
        # xlogy, since 0 log 0 is 0 here and nan by multiplication; computed before the probabilities are overwritten
        inner_AW = torch.xlogy(probs_AW, probs_AW).addcmul_(probs_AW, entropies_A[:, None])
    if of_logprobs_A is None:
        out_AW = probs_AW.zero_()
    else:
        out_AW = probs_AW.mul_(-of_logprobs_A[:, None]).scatter_add_(1, targets_A[:, None], of_logprobs_A[:, None])
    if inner_AW is not None and of_entropies_A is not None:
        out_AW.addcmul_(inner_AW, of_entropies_A[:, None], value=-1)
    return out_AW
