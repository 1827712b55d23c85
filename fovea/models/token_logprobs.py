"""Log-probs and entropies of actions from hidden states, with few passes over tensors [actions, vocabulary].

They are of the distribution that completions are drawn from (`drawn_distribution`).

Axes: `A` actions, `E` width of the model, `W` vocabulary, `K` banned ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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


@dataclass(frozen=True, slots=True)
class Slopes:
    """Derivatives of a loss by log-probs [A] and by entropies [A], where they are known before the loss."""

    of: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
    """A function of both; None for entropies that are not in the loss. Those of an action follow from its own two
    numbers: it is called after each chunk, when the numbers of actions that are yet to come are 0."""
    rounding: Tensor | float = 0.0
    """The least difference that the order of sums may make, of terms that cancel in a slope."""


def token_scores(
    hidden_AE: Tensor,
    head_WE: Tensor,
    targets_A: Tensor,
    banned_K: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    slopes: Slopes | None = None,
) -> TokenScores:
    """Log-probs and entropies at `temperature`, with logits for `chunk_tokens` actions at a time.

    The log-prob of a banned target is -inf (`drawn_distribution.check_drawable`). `slopes` are those of the loss whose
    backward pass will follow: with them, the logits of several chunks are computed once instead of twice.
    """
    given = (hidden_AE, head_WE, targets_A, banned_K, temperature)
    in_chunks = len(hidden_AE) > chunk_tokens and torch.is_grad_enabled()
    if in_chunks and slopes is not None:
        scores: Scores = ScoresWithGradients.apply(*given, chunk_tokens, slopes)  # type: ignore[no-untyped-call]
    else:
        scores = _scores_by_chunks(*given, chunk_tokens, recompute=in_chunks)
    logprobs_A, entropies_A, masses_A = scores
    return TokenScores(logprobs_A=logprobs_A, entropies_A=entropies_A, banned_mass_A=masses_A)


Scores = tuple[Tensor, Tensor, Tensor]
"""Log-probs, entropies and banned mass, [A] each."""


def _scores_by_chunks(
    hidden_AE: Tensor,
    head_WE: Tensor,
    targets_A: Tensor,
    banned_K: Tensor,
    temperature: float,
    chunk_tokens: int,
    *,
    recompute: bool,
) -> Scores:
    apply: Callable[..., Scores] = LogprobAndEntropy.apply
    if recompute:
        # probabilities are computed again in the backward pass: saved, they would take what chunking frees
        apply = partial(checkpoint, apply, use_reentrant=False)
    parts = zip(hidden_AE.split(chunk_tokens), targets_A.split(chunk_tokens), strict=True)
    chunks = [apply(hidden, head_WE, targets, banned_K, temperature) for hidden, targets in parts]
    logprobs, entropies, masses = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies), torch.cat(masses)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Distributions:
    """Softmax over the ids that are not banned."""

    probs_AW: Tensor
    weighted_AW: Tensor
    """p log p; 0 at banned ids."""
    logprobs_A: Tensor
    entropies_A: Tensor
    banned_mass_A: Tensor

    @staticmethod
    def of(
        hidden_AE: Tensor, head_WE: Tensor, targets_A: Tensor, banned_K: Tensor, temperature: float
    ) -> _Distributions:
        targets_A1 = targets_A[:, None]
        logits_AW = (hidden_AE @ head_WE.t()).float()
        banned_logits_AK = logits_AW[:, banned_K] / temperature
        logprobs_AW = drawn_logprobs_(logits_AW, temperature, banned_K)
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
        )

    @property
    def scores(self) -> Scores:
        return self.logprobs_A, self.entropies_A, self.banned_mass_A

    def gradient_(self, targets_A: Tensor, slopes: Sequence[Tensor | None], temperature: float) -> Tensor:
        """Gradient of the logits [A, W] from slopes by log-probs and entropies; overwrites the probabilities."""
        of_scaled_AW = _gradient_of_logits(
            self.probs_AW, targets_A, self.entropies_A, *slopes, weighted_AW=self.weighted_AW
        )
        return _unscaled(of_scaled_AW, temperature)


class LogprobAndEntropy(torch.autograd.Function):
    """log p(target) and entropy H = -sum p log p for p = softmax(h W' / temperature) over the ids that are not banned.

    With z the scaled logits: d log p(t) / dz = onehot(t) - p and dH / dz = -p (log p + H). A banned id has p = 0 and no
    gradient, and adds nothing to H, since 0 log 0 is 0.
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
        of_hidden, of_head = gradients_of_head(ctx, hidden_AE, head_WE, (probs_AW, targets_A, entropies_A), gradients)
        return of_hidden, of_head, None, None, None


class ScoresWithGradients(torch.autograd.Function):
    """`LogprobAndEntropy` of several chunks, whose gradients are made right where their logits are.

    The slopes that the backward pass brings are known before it, and only compared with those that were given.
    """

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 (`apply` takes no names)
        ctx: Any,
        hidden_AE: Tensor,
        head_WE: Tensor,
        targets_A: Tensor,
        banned_K: Tensor,
        temperature: float,
        chunk_tokens: int,
        slopes: Slopes,
    ) -> Scores:
        scores: Scores = (_zeros(hidden_AE), _zeros(hidden_AE), _zeros(hidden_AE))
        of_hidden_AE = torch.empty_like(hidden_AE) if ctx.needs_input_grad[0] else None
        of_head_WE = torch.zeros_like(head_WE, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        used: list[tuple[Tensor, ...]] = []
        for first in range(0, len(hidden_AE), chunk_tokens):
            part = slice(first, first + chunk_tokens)
            found = _Distributions.of(hidden_AE[part], head_WE, targets_A[part], banned_K, temperature)
            for all_A, of_part in zip(scores, found.scores, strict=True):
                all_A[part] = of_part
            of_actions = [None if all_A is None else all_A[part] for all_A in slopes.of(scores[0], scores[1])]
            of_logits_AW = found.gradient_(targets_A[part], of_actions, temperature).to(hidden_AE.dtype)
            if of_hidden_AE is not None:
                torch.mm(of_logits_AW, head_WE, out=of_hidden_AE[part])
            if of_head_WE is not None:
                _add_product(of_head_WE, of_logits_AW.t(), hidden_AE[part])
            used.append(tuple(slope_A for slope_A in of_actions if slope_A is not None))
            # the next chunk takes their memory
            del found, of_logits_AW
        ctx.save_for_backward(of_hidden_AE, of_head_WE, *(torch.cat(parts) for parts in zip(*used, strict=True)))
        ctx.rounding = slopes.rounding
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(scores[2])
        return scores

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        of_hidden_AE, of_head_WE, *used = ctx.saved_tensors
        _check_slopes(used, [slope_A for slope_A in gradients[:2] if slope_A is not None], ctx.rounding)
        return of_hidden_AE, of_head_WE, None, None, None, None, None


def _zeros(hidden_AE: Tensor) -> Tensor:
    return hidden_AE.new_zeros(len(hidden_AE), dtype=torch.float32)


def _add_product(sum_WE: Tensor, of_logits_WA: Tensor, hidden_AE: Tensor) -> None:
    """Add a chunk's gradient of the head to that of the others, which stays in float32: 16 bits lose small ones."""
    if hidden_AE.dtype == torch.float32:
        torch.addmm(sum_WE, of_logits_WA, hidden_AE, out=sum_WE)
    else:
        sum_WE.add_(of_logits_WA @ hidden_AE)


def _check_slopes(used: Sequence[Tensor], found: Sequence[Tensor], rounding: Tensor | float) -> None:
    """RuntimeError if the backward pass begins with other slopes than gradients were made of."""
    assert len(used) == len(found), f"gradients of {len(used)} slopes were made, and the loss has {len(found)}"
    for used_A, found_A in zip(used, found, strict=True):
        # equal up to the order of sums over equal completions; a slope that is not finite makes the loss so, and the
        # update is skipped
        limit = 1e-4 * used_A.nan_to_num(0, 0, 0).abs().max() + rounding
        near_A = (used_A - found_A).abs() <= limit
        # on the device, for which the host does not wait
        torch._assert_async((near_A | ~used_A.isfinite()).all(), "the loss is none whose slopes were known before it")


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
    of_logits_AW = _unscaled(_gradient_of_logits(*scored, *gradients[:2]), ctx.temperature).to(hidden_AE.dtype)
    of_hidden = of_logits_AW @ head_WE if ctx.needs_input_grad[0] else None
    of_head = of_logits_AW.t() @ hidden_AE if ctx.needs_input_grad[1] else None
    return of_hidden, of_head


def _gradient_of_logits(
    probs_AW: Tensor,
    targets_A: Tensor,
    entropies_A: Tensor,
    of_logprobs_A: Tensor | None,
    of_entropies_A: Tensor | None,
    *,
    weighted_AW: Tensor | None = None,
) -> Tensor:
    """Gradient of the scaled logits [A, W]. Overwrites the probabilities, and p log p where it is still there."""
    # in place on a saved tensor: safe, since autograd refuses a second backward pass through a freed graph
    inner_AW = None
    if of_entropies_A is not None:
        # xlogy, since 0 log 0 is 0 here and nan by multiplication; computed before the probabilities are overwritten
        weighted_AW = torch.xlogy(probs_AW, probs_AW) if weighted_AW is None else weighted_AW
        inner_AW = weighted_AW.addcmul_(probs_AW, entropies_A[:, None])
    if of_logprobs_A is None:
        out_AW = probs_AW.zero_()
    else:
        out_AW = probs_AW.mul_(-of_logprobs_A[:, None]).scatter_add_(1, targets_A[:, None], of_logprobs_A[:, None])
    if inner_AW is not None and of_entropies_A is not None:
        out_AW.addcmul_(inner_AW, of_entropies_A[:, None], value=-1)
    return out_AW


def _unscaled(of_scaled_AW: Tensor, temperature: float) -> Tensor:
    """Gradient of the logits, from that of the scaled ones, which it overwrites."""
    return of_scaled_AW if temperature == 1 else of_scaled_AW.div_(temperature)
