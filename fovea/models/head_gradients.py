"""Scores of actions by chunks, and gradients of hidden states and head, with few tensors of the size of logits.

Where the derivatives of a loss by log-probs can be computed before it, each chunk's gradients are made right behind its
logits, which are then computed once (`ScoresWithGradients`). Both kinds of distributions, of a whole vocabulary
(`token_logprobs`) and of a slice of it (`train.megatron.sharded_logprobs`), are differentiated here.

Axes: `A` actions, `E` width of the model, `W` vocabulary, or the slice of it that a rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

DEPENDS_ON_OTHERS = (
    "the loss of a token depends on the log-probs of other tokens, which are not known when its gradient is made; set "
    "couples_tokens = 'always' in the class of the loss's settings"
)

Scores: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Log-probs, entropies and banned mass, [A] each."""


@dataclass(frozen=True, slots=True)
class LossGradients:
    """Derivatives of a loss by log-probs [A] and by entropies [A], where they are known before the loss."""

    of: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
    """A function of both; None for entropies that are not in the loss. The derivatives of an action follow from its two
    numbers: it is called after each chunk, when the numbers of actions that are yet to come are 0."""
    rounding: Tensor | float = 0.0
    """The least difference that the order of sums may make, of terms that cancel in a derivative."""


class Distributions(Protocol):
    """Distributions of some actions over the ids that may be sampled."""

    @property
    def scores(self) -> Scores:
        """Log-probs, entropies and banned mass of the actions."""
        ...

    def gradient_(self, loss_gradients: Sequence[Tensor | None]) -> Tensor:
        """Gradient of the logits [A, W] from derivatives by log-probs and entropies; overwrites the distributions."""
        ...


Distribute: TypeAlias = Callable[[Tensor, Tensor, Tensor], Distributions]
"""(hidden [A, E], head [W, E], targets [A]) -> distributions of these actions."""


def scores_by_chunks(
    hidden_AE: Tensor,
    head_WE: Tensor,
    targets_A: Tensor,
    *,
    distribute: Distribute,
    of_chunk: Callable[[Tensor, Tensor], Scores],
    chunk_tokens: int,
    loss_gradients: LossGradients | None,
) -> Scores:
    """Scores with logits for `chunk_tokens` actions at a time.

    With the `loss_gradients` of the loss whose backward pass will follow, the logits of several chunks are computed
    once, by `distribute`. Without, `of_chunk` (hidden, targets) scores each and differentiates itself, and runs once
    more in the backward pass where there are several: probabilities that wait for it would take what chunking frees.
    """
    in_chunks = len(hidden_AE) > chunk_tokens and torch.is_grad_enabled()
    if in_chunks and loss_gradients is not None:
        scores: Scores = ScoresWithGradients.apply(
            hidden_AE, head_WE, targets_A, distribute, chunk_tokens, loss_gradients
        )  # type: ignore[no-untyped-call]
        return scores
    if in_chunks:
        of_chunk = partial(checkpoint, of_chunk, use_reentrant=False)
    chunks = [
        of_chunk(*each) for each in zip(hidden_AE.split(chunk_tokens), targets_A.split(chunk_tokens), strict=True)
    ]
    logprobs, entropies, masses = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies), torch.cat(masses)


class ScoresWithGradients(torch.autograd.Function):
    """Scores of several chunks of actions, whose gradients are made right where their logits are.

    The derivatives that the backward pass brings are only compared with the given ones.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_AE: Tensor,
        head_WE: Tensor,
        targets_A: Tensor,
        distribute: Distribute,
        chunk_tokens: int,
        loss_gradients: LossGradients,
    ) -> Scores:
        scores: Scores = (_zeros(hidden_AE), _zeros(hidden_AE), _zeros(hidden_AE))
        of_hidden_AE = torch.empty_like(hidden_AE) if ctx.needs_input_grad[0] else None
        of_head_WE = torch.zeros_like(head_WE, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        used: list[tuple[Tensor, ...]] = []
        for first in range(0, len(hidden_AE), chunk_tokens):
            part = slice(first, first + chunk_tokens)
            found = distribute(hidden_AE[part], head_WE, targets_A[part])
            for all_A, of_part in zip(scores, found.scores, strict=True):
                all_A[part] = of_part
            of_actions = [None if all_A is None else all_A[part] for all_A in loss_gradients.of(scores[0], scores[1])]
            of_logits_AW = found.gradient_(of_actions).to(hidden_AE.dtype)
            if of_hidden_AE is not None:
                torch.mm(of_logits_AW, head_WE, out=of_hidden_AE[part])
            if of_head_WE is not None:
                add_product(of_head_WE, of_logits_AW.t(), hidden_AE[part])
            used.append(tuple(gradient_A for gradient_A in of_actions if gradient_A is not None))
            # the next chunk takes their memory
            del found, of_logits_AW
        ctx.save_for_backward(of_hidden_AE, of_head_WE, *(torch.cat(parts) for parts in zip(*used, strict=True)))
        ctx.rounding = loss_gradients.rounding
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(scores[2])
        return scores

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        of_hidden_AE, of_head_WE, *used = ctx.saved_tensors
        _check_gradients(used, [gradient_A for gradient_A in gradients[:2] if gradient_A is not None], ctx.rounding)
        return of_hidden_AE, of_head_WE, None, None, None, None


def _zeros(hidden_AE: Tensor) -> Tensor:
    return hidden_AE.new_zeros(len(hidden_AE), dtype=torch.float32)


def add_product(sum_WE: Tensor, of_logits_WA: Tensor, hidden_AE: Tensor) -> None:
    """Add a chunk's gradient of the head to that of the others, which stays in float32: 16 bits lose small ones."""
    if hidden_AE.dtype == torch.float32:
        torch.addmm(sum_WE, of_logits_WA, hidden_AE, out=sum_WE)
    elif hidden_AE.device.type == "cpu":
        # its kernels round the product to 16 bits first
        sum_WE.add_(of_logits_WA @ hidden_AE)
    else:
        torch.addmm(sum_WE, of_logits_WA, hidden_AE, out_dtype=torch.float32, out=sum_WE)


def _check_gradients(used: Sequence[Tensor], found: Sequence[Tensor], rounding: Tensor | float) -> None:
    """RuntimeError if the backward pass begins with other derivatives than gradients were made of."""
    assert len(used) == len(found), f"gradients of {len(used)} derivatives were made, and the loss has {len(found)}"
    for used_A, found_A in zip(used, found, strict=True):
        # equal up to the order of sums over equal completions; a derivative or an advantage (in `rounding`) that is not
        # finite makes the loss so, and the update is skipped
        limit = 1e-4 * used_A.nan_to_num(0, 0, 0).abs().max() + rounding
        near_A = ((used_A - found_A).abs() <= limit) | limit.isnan()
        # on the device, for which the host does not wait
        torch._assert_async((near_A | ~used_A.isfinite()).all(), DEPENDS_ON_OTHERS)


def gradients_of_head(
    ctx: Any,
    hidden_AE: Tensor,
    head_WE: Tensor,
    of_logits_AW: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of hidden states and head where they are needed, from that of the logits in float32."""
    of_logits_AW = of_logits_AW.to(hidden_AE.dtype)
    of_hidden = of_logits_AW @ head_WE if ctx.needs_input_grad[0] else None
    of_head = of_logits_AW.t() @ hidden_AE if ctx.needs_input_grad[1] else None
    return of_hidden, of_head


def gradient_of_logits_(
    probs_AW: Tensor,
    targets_A: Tensor,
    entropies_A: Tensor,
    loss_gradients: Sequence[Tensor | None],
    temperature: float,
    *,
    weighted_AW: Tensor | None = None,
    has_target_A: Tensor | None = None,
) -> Tensor:
    """Gradient of the logits [A, W] from derivatives by log-probs and entropies; overwrites what it is given.

    With z the scaled logits: d log p(t) / dz = onehot(t) - p and dH / dz = -p (log p + H). `weighted_AW` is p log p,
    where it is still there; `has_target_A` says which targets lie in this slice of the vocabulary, None: all.
    """
    of_logprobs_A, of_entropies_A = loss_gradients[0], loss_gradients[1]
    # in place on a saved tensor: safe, since autograd refuses a second backward pass through a freed graph
    inner_AW = None
    if of_entropies_A is not None:
        # xlogy, since 0 log 0 is 0 here and nan by multiplication; computed before the probabilities are overwritten
        weighted_AW = torch.xlogy(probs_AW, probs_AW) if weighted_AW is None else weighted_AW
        inner_AW = weighted_AW.addcmul_(probs_AW, entropies_A[:, None])
    if of_logprobs_A is None:
        out_AW = probs_AW.zero_()
    else:
        of_targets_A = of_logprobs_A if has_target_A is None else of_logprobs_A.where(has_target_A, 0.0)
        out_AW = probs_AW.mul_(-of_logprobs_A[:, None]).scatter_add_(1, targets_A[:, None], of_targets_A[:, None])
    if inner_AW is not None and of_entropies_A is not None:
        out_AW.addcmul_(inner_AW, of_entropies_A[:, None], value=-1)
    return out_AW if temperature == 1 else out_AW.div_(temperature)
