"""Log-probs and entropies of actions where each rank has the logits of a slice of the vocabulary.

The twin of `models.token_logprobs`, of the same distribution: at the temperature, without the banned ids.

Axes: `A` actions, `E` width of the model, `S` this rank's slice of the vocabulary, `K` banned ids in the slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fovea.models.token_logprobs import Scores, TokenScores


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularySlice:
    """The consecutive ids that a rank has the logits of."""

    first: int
    size: int
    group: dist.ProcessGroup
    """The ranks that have the whole vocabulary together."""

    def banned(self, banned_ids: Tensor) -> Tensor:
        """Places [K] in the slice of those banned ids that lie in it."""
        places = banned_ids - self.first
        return places[(places >= 0) & (places < self.size)]

    def reduce(self, values: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        """The sum, or another reduction, over all slices, in place."""
        if self.group.size() > 1:
            dist.all_reduce(values, operation, group=self.group)
        return values


def sharded_token_scores(
    hidden_AE: Tensor,
    head_SE: Tensor,
    targets_A: Tensor,
    banned_K: Tensor,
    of: VocabularySlice,
    *,
    temperature: float,
    chunk_tokens: int,
) -> TokenScores:
    """Log-probs and entropies at `temperature`, on all ranks of the group, with logits for `chunk_tokens` at a time.

    `targets_A` are ids of the vocabulary, `banned_K` places in the slice. The gradient of `hidden_AE` is this slice's
    part, which the caller sums over the group.
    """
    recompute = len(hidden_AE) > chunk_tokens and torch.is_grad_enabled()
    chunks = []
    for hidden, targets in zip(hidden_AE.split(chunk_tokens), targets_A.split(chunk_tokens), strict=True):
        given = (hidden, head_SE, targets, banned_K, of, temperature)
        scores: Scores = (
            checkpoint(ShardedLogprobAndEntropy.apply, *given, use_reentrant=False)
            if recompute
            else ShardedLogprobAndEntropy.apply(*given)  # type: ignore[no-untyped-call]
        )
        chunks.append(scores)
    logprobs, entropies, masses = zip(*chunks, strict=True)
    return TokenScores(
        logprobs_A=torch.cat(logprobs), entropies_A=torch.cat(entropies), banned_mass_A=torch.cat(masses)
    )


class ShardedLogprobAndEntropy(torch.autograd.Function):
    """`LogprobAndEntropy` with its sums over the vocabulary added up over the slices.

    With z the scaled logits, log Z their log-sum-exp over the ids that may be drawn, and p = exp(z - log Z):
    log p(t) = z_t - log Z and H = log Z - sum p z. Each needs numbers [A] of the other slices alone.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_AE: Tensor,
        head_SE: Tensor,
        targets_A: Tensor,
        banned_K: Tensor,
        of: VocabularySlice,
        temperature: float,
    ) -> Scores:
        logits_AS = (hidden_AE @ head_SE.t()).float() / temperature
        banned_logits_AK = logits_AS[:, banned_K]
        logits_AS.index_fill_(1, banned_K, -torch.inf)
        places_A = targets_A - of.first
        is_mine_A = (places_A >= 0) & (places_A < of.size)
        places_A = places_A.clamp(0, of.size - 1)
        largest = torch.stack([logits_AS.amax(1), _largest(banned_logits_AK)])
        largest_A, largest_banned_A = of.reduce(largest, dist.ReduceOp.MAX)
        probs_AS = (logits_AS - largest_A[:, None]).exp_()
        target_A = logits_AS.gather(1, places_A[:, None])[:, 0].where(is_mine_A, 0.0)
        logits_AS.index_fill_(1, banned_K, 0.0)  # 0 times -inf would be NaN
        sums = torch.stack(
            [
                probs_AS.sum(1),
                (probs_AS * logits_AS).sum(1),
                (banned_logits_AK - largest_banned_A[:, None]).exp().sum(1),
                target_A,
            ]
        )
        sum_A, weighed_A, banned_A, target_A = of.reduce(sums)
        log_sum_A = largest_A + sum_A.log()
        probs_AS /= sum_A[:, None]
        entropies_A = log_sum_A - weighed_A / sum_A
        # the odds of all banned ids together against all others
        masses_A = torch.sigmoid(largest_banned_A + banned_A.log() - log_sum_A)
        ctx.save_for_backward(hidden_AE, head_SE, places_A, is_mine_A, probs_AS, entropies_A)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(masses_A)
        return target_A - log_sum_A, entropies_A, masses_A

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_AE, head_SE, places_A, is_mine_A, probs_AS, entropies_A = ctx.saved_tensors
        of_logprobs_A, of_entropies_A, _ = gradients
        of_logits_AS = torch.zeros_like(probs_AS)
        if of_entropies_A is not None:
            # dH / dz = -p (log p + H)
            surprise_AS = torch.xlogy(probs_AS, probs_AS).addcmul_(probs_AS, entropies_A[:, None])
            of_logits_AS.addcmul_(surprise_AS, of_entropies_A[:, None], value=-1)
        if of_logprobs_A is not None:
            # d log p(t) / dz = onehot(t) - p
            of_logits_AS.addcmul_(probs_AS, of_logprobs_A[:, None], value=-1)
            of_logits_AS.scatter_add_(1, places_A[:, None], of_logprobs_A.where(is_mine_A, 0.0)[:, None])
        of_logits_AS = (of_logits_AS / ctx.temperature).to(hidden_AE.dtype)
        of_hidden = of_logits_AS @ head_SE if ctx.needs_input_grad[0] else None
        of_head = of_logits_AS.t() @ hidden_AE if ctx.needs_input_grad[1] else None
        return of_hidden, of_head, None, None, None, None


def _largest(banned_logits_AK: Tensor) -> Tensor:
    """Largest of each row [A]; far below all logits where the slice has no banned ids."""
    if not banned_logits_AK.shape[1]:
        return banned_logits_AK.new_full(banned_logits_AK.shape[:1], torch.finfo(torch.float32).min)
    return banned_logits_AK.amax(1)
