"""Log-probs and entropies of actions where each rank has the logits of a slice of the vocabulary.

The counterpart of `models.token_logprobs` for the same distribution: at the temperature, without the banned ids.

Axes: `A` actions, `E` width of the model, `S` this rank's slice of the vocabulary, `K` banned ids in the slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fovea.models.head_gradients import LossGradients, Scores, gradient_of_logits_, gradients_of_head, scores_by_chunks
from fovea.models.token_logprobs import TokenScores


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularySlice:
    """The consecutive token ids whose logits a rank has."""

    first: int
    size: int
    banned_K: Tensor
    """Indices, within the slice, of the banned ids that lie in it."""
    group: dist.ProcessGroup
    """The ranks that together have the whole vocabulary."""

    @staticmethod
    def of_rank(rank: int, size: int, banned_ids: Tensor, group: dist.ProcessGroup) -> VocabularySlice:
        """The slice of one rank in a group with slices of equal size."""
        places = banned_ids - rank * size
        banned_K = places[(places >= 0) & (places < size)]
        return VocabularySlice(first=rank * size, size=size, banned_K=banned_K, group=group)

    def reduce(self, values: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        """The sum, or another reduction, over all slices, in place."""
        if self.group.size() > 1:
            dist.all_reduce(values, operation, group=self.group)
        return values


def sharded_token_scores(
    hidden_AE: Tensor,
    head_SE: Tensor,
    targets_A: Tensor,
    vocabulary: VocabularySlice,
    *,
    temperature: float,
    chunk_tokens: int,
    loss_gradients: LossGradients | None = None,
) -> TokenScores:
    """Log-probs and entropies at `temperature`, on all ranks of the group, with logits for `chunk_tokens` at a time.

    `targets_A` are ids of the vocabulary. The gradient of `hidden_AE` is this slice's part, which the caller sums over
    the group. With the `loss_gradients` of the loss whose backward pass will follow, the logits of several chunks are
    computed once instead of twice.
    """
    distribute = partial(_SlicedDistributions.of, vocabulary=vocabulary, temperature=temperature)

    def of_chunk(hidden_AE: Tensor, targets_A: Tensor) -> Scores:
        scores: Scores = ShardedLogprobAndEntropy.apply(hidden_AE, head_SE, targets_A, distribute, temperature)  # type: ignore[no-untyped-call]
        return scores

    logprobs_A, entropies_A, masses_A = scores_by_chunks(
        hidden_AE,
        head_SE,
        targets_A,
        distribute=distribute,
        of_chunk=of_chunk,
        chunk_tokens=chunk_tokens,
        loss_gradients=loss_gradients,
    )
    return TokenScores(logprobs_A=logprobs_A, entropies_A=entropies_A, banned_mass_A=masses_A)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SlicedDistributions:
    """This slice of the softmax over the ids that are not banned.

    With z the scaled logits, log Z their log-sum-exp over the ids that may be sampled, and p = exp(z - log Z): log p(t)
    = z_t - log Z and H = log Z - sum p z. Each needs only numbers [A] from the other slices.
    """

    probs_AS: Tensor
    weighed_AS: Tensor
    """The products p z, which are 0 at banned ids."""
    log_sum_A: Tensor
    """log Z."""
    places_A: Tensor
    """Index of each target within the slice; arbitrary for a target in another slice."""
    is_mine_A: Tensor
    scores: Scores
    temperature: float

    @staticmethod
    def of(
        hidden_AE: Tensor,
        head_SE: Tensor,
        targets_A: Tensor,
        vocabulary: VocabularySlice,
        temperature: float,
    ) -> _SlicedDistributions:
        logits_AS = (hidden_AE @ head_SE.t()).float().div_(temperature)
        banned_logits_AK = logits_AS[:, vocabulary.banned_K]
        logits_AS.index_fill_(1, vocabulary.banned_K, -torch.inf)
        places_A = targets_A - vocabulary.first
        is_mine_A = (places_A >= 0) & (places_A < vocabulary.size)
        places_A = places_A.clamp(0, vocabulary.size - 1)
        largest = torch.stack([logits_AS.amax(1), _largest(banned_logits_AK)])
        largest_A, largest_banned_A = vocabulary.reduce(largest, dist.ReduceOp.MAX)
        probs_AS = (logits_AS - largest_A[:, None]).exp_()
        target_A = logits_AS.gather(1, places_A[:, None])[:, 0].where(is_mine_A, 0.0)
        logits_AS.index_fill_(1, vocabulary.banned_K, 0.0)  # 0 times -inf would be NaN
        weighed_AS = logits_AS.mul_(probs_AS)  # in place, so that there are only two tensors [A, S]
        sums = torch.stack(
            [
                probs_AS.sum(1),
                weighed_AS.sum(1),
                (banned_logits_AK - largest_banned_A[:, None]).exp().sum(1),
                target_A,
            ]
        )
        sum_A, weighed_A, banned_A, target_A = vocabulary.reduce(sums)
        log_sum_A = largest_A + sum_A.log()
        # from the log-odds of all banned ids together against all others
        masses_A = torch.sigmoid(largest_banned_A + banned_A.log() - log_sum_A)
        return _SlicedDistributions(
            probs_AS=probs_AS.div_(sum_A[:, None]),
            weighed_AS=weighed_AS.div_(sum_A[:, None]),
            log_sum_A=log_sum_A,
            places_A=places_A,
            is_mine_A=is_mine_A,
            scores=(target_A - log_sum_A, log_sum_A - weighed_A / sum_A, masses_A),
            temperature=temperature,
        )

    def gradient_(self, loss_gradients: Sequence[Tensor | None]) -> Tensor:
        if loss_gradients[1] is not None:
            # p log p = p z - p log Z
            self.weighed_AS.addcmul_(self.probs_AS, self.log_sum_A[:, None], value=-1)
        return gradient_of_logits_(
            self.probs_AS,
            self.places_A,
            self.scores[1],
            loss_gradients,
            self.temperature,
            weighted_AW=self.weighed_AS,
            has_target_A=self.is_mine_A,
        )


class ShardedLogprobAndEntropy(torch.autograd.Function):
    """`LogprobAndEntropy` with its sums over the vocabulary reduced over the slices."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_AE: Tensor,
        head_SE: Tensor,
        targets_A: Tensor,
        distribute: Callable[[Tensor, Tensor, Tensor], _SlicedDistributions],
        temperature: float,
    ) -> Scores:
        found = distribute(hidden_AE, head_SE, targets_A)
        _, entropies_A, masses_A = found.scores
        ctx.save_for_backward(hidden_AE, head_SE, found.places_A, found.is_mine_A, found.probs_AS, entropies_A)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(masses_A)
        return found.scores

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_AE, head_SE, places_A, is_mine_A, probs_AS, entropies_A = ctx.saved_tensors
        of_logits_AS = gradient_of_logits_(
            probs_AS, places_A, entropies_A, gradients, ctx.temperature, has_target_A=is_mine_A
        )
        return *gradients_of_head(ctx, hidden_AE, head_SE, of_logits_AS), None, None, None


def _largest(banned_logits_AK: Tensor) -> Tensor:
    """Largest logit of each row [A]; far below all logits if the slice has no banned ids."""
    if not banned_logits_AK.shape[1]:
        return banned_logits_AK.new_full(banned_logits_AK.shape[:1], torch.finfo(torch.float32).min)
    return banned_logits_AK.amax(1)
