"""Distributions of a rollout on the activation tape: the update's head needs no forward product and no softmax.

The engine has computed the probabilities of all tokens to draw one. While the weights are those of the rollout, the
update reads them: log-probs and entropies are known, and the gradient of the logits is made of them. The slow twin is
`token_logprobs.token_scores`, which computes them from hidden states.

Axes: `B` rows of the decode batch, `R` rows of it that are recorded, `P` places on the activation tape, `A` actions,
`E` width of the model, `W` vocabulary, `K` banned ids.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fovea.models.drawn_distribution import DrawnWeights, banned_mass
from fovea.models.head_gradients import gradient_of_logits_, gradients_of_head
from fovea.models.token_logprobs import TokenScores

NOT_KEPT = -1
"""The row of a place whose distribution is not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributionRows:
    """Where the distributions of a decode step are recorded."""

    probs_RW: Tensor
    entropies_R: Tensor
    banned_mass_R: Tensor
    of_batch_R: Tensor | None = None
    """Index of the recorded rows in the decode batch; None: all of them."""

    @property
    def weights_out(self) -> Tensor | None:
        """Where a decode step may write its weights: they become the recorded probabilities."""
        return self.probs_RW if self.of_batch_R is None else None

    def write(self, drawn: DrawnWeights, banned_logits_BK: Tensor) -> None:
        """Record distributions by their weights, which are lost, and by the scaled logits of banned ids."""
        measured = (drawn.entropies_(), banned_mass(banned_logits_BK, drawn.logsumexp()), drawn.total_B1)
        weights_RW = drawn.weights_BW
        if self.of_batch_R is not None:
            measured = tuple(x[self.of_batch_R] for x in measured)  # type: ignore[assignment]
            weights_RW = weights_RW[self.of_batch_R]
        entropies_R, masses_R, total_R1 = measured
        self.entropies_R.copy_(entropies_R)
        self.banned_mass_R.copy_(masses_R)
        torch.div(weights_RW, total_R1, out=self.probs_RW)


class DistributionTape:
    """Distributions by the place of the token that predicts them, of one temperature."""

    def __init__(self, vocabulary: int, temperature: float) -> None:
        """`temperature` is that of the update."""
        self.temperature = temperature
        self.row_bytes = torch.float32.itemsize * vocabulary
        self._vocabulary = vocabulary
        self._probs = torch.empty(0, vocabulary)
        self._entropies, self._masses = torch.empty(0), torch.empty(0)
        self._row_P = torch.empty(0, dtype=torch.long)
        self._used = 0

    def restart(self) -> None:
        """Discard all distributions."""
        self._used = 0
        self._row_P.fill_(NOT_KEPT)

    def make_room(self, num_rows: int, num_places: int) -> None:
        """Reserve the addresses of so many rows, for tokens on so many places, before the first one is written."""
        if len(self._probs) < num_rows or len(self._row_P) < num_places:
            assert not self._used, "recorded distributions would be lost"
            # the system backs a page with memory when it is first written
            self._probs = torch.empty(num_rows, self._vocabulary)
            self._entropies, self._masses = torch.empty(num_rows), torch.empty(num_rows)
            self._row_P = torch.full((num_places,), NOT_KEPT)

    def rows(self, places_R: Tensor, of_batch_R: Tensor | None = None) -> DistributionRows:
        """Rows for what tokens at these places predict."""
        rows = slice(self._used, self._used + len(places_R))
        self._row_P[places_R] = torch.arange(rows.start, rows.stop)
        self._used = rows.stop
        return DistributionRows(
            probs_RW=self._probs[rows],
            entropies_R=self._entropies[rows],
            banned_mass_R=self._masses[rows],
            of_batch_R=of_batch_R,
        )

    def read(self, places_A: Tensor) -> RecordedDistributions | None:
        """The distributions that tokens at these places predict; None unless all of them are recorded."""
        if not len(self._row_P):
            return None
        row_A = self._row_P[places_A]
        if (row_A == NOT_KEPT).any():
            return None
        return RecordedDistributions(
            probs_RW=self._probs,
            row_A=row_A,
            entropies_A=self._entropies[row_A],
            banned_mass_A=self._masses[row_A],
            temperature=self.temperature,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedDistributions:
    """Distributions of the actions of a packed row."""

    probs_RW: Tensor
    """The whole tape."""
    row_A: Tensor
    entropies_A: Tensor
    banned_mass_A: Tensor
    temperature: float

    def scores(self, hidden_AE: Tensor, head_WE: Tensor, targets_A: Tensor, *, chunk_tokens: int) -> TokenScores:
        """As `token_scores`; gradients of logits are made for `chunk_tokens` actions at a time."""
        parts = (hidden_AE, targets_A, self.row_A, self.entropies_A)
        chunks = [
            KnownLogprobAndEntropy.apply(hidden, head_WE, targets, replace(self, row_A=rows, entropies_A=entropies))  # type: ignore[no-untyped-call]
            for hidden, targets, rows, entropies in zip(*(x.split(chunk_tokens) for x in parts), strict=True)
        ]
        logprobs, entropies = (torch.cat(each) for each in zip(*chunks, strict=True))
        return TokenScores(logprobs_A=logprobs, entropies_A=entropies, banned_mass_A=self.banned_mass_A)


class KnownLogprobAndEntropy(torch.autograd.Function):
    """`token_logprobs.LogprobAndEntropy` with a forward pass that looks up."""

    @staticmethod
    def forward(
        ctx: Any, hidden_AE: Tensor, head_WE: Tensor, targets_A: Tensor, known: RecordedDistributions
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden_AE, head_WE, targets_A)
        ctx.known, ctx.temperature = known, known.temperature
        ctx.set_materialize_grads(False)
        # an output must not be an input: the gradient of the entropies is this function's
        return known.probs_RW[known.row_A, targets_A].log(), known.entropies_A.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden_AE, head_WE, targets_A = ctx.saved_tensors
        # a copy, which becomes the gradient of the logits
        probs_AW = ctx.known.probs_RW.index_select(0, ctx.known.row_A)
        of_logits_AW = gradient_of_logits_(probs_AW, targets_A, ctx.known.entropies_A, gradients, ctx.temperature)
        return *gradients_of_head(ctx, hidden_AE, head_WE, of_logits_AW), None, None
