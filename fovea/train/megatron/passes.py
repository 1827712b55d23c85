"""Forward and backward passes of a Megatron model over micro-batches, by Megatron's own schedules.

Each distinct completion is a row after a copy of its prompt: Megatron's attention does not support shared prefixes.
Axes: `A` actions of a micro-batch, `U` actions of its distinct completions, `N` tokens of all rows, `E` width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch import Tensor

from fovea.config.algorithm import Algorithm
from fovea.models.head_gradients import LossGradients
from fovea.models.heads import ValueHead
from fovea.models.plain import PlainRow, plain_rows
from fovea.models.shared_prefix.layout import PackedRow
from fovea.models.token_logprobs import TokenScores
from fovea.train.loss import Measured, policy_loss, precomputed_loss_gradients
from fovea.train.megatron.model import MegatronModel
from fovea.train.megatron.sharded_logprobs import VocabularySlice, sharded_token_scores
from fovea.train.packing import MicroBatch

LossOfRow = Callable[[int, TokenScores], Tensor]
"""Loss of the row with this index."""
LossGradientsOfRow = Callable[[int], LossGradients | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTokens:
    """Number of tokens that passes have processed."""

    tokens: int = 0
    packed_tokens: int = 0
    """Includes copies of prompts and the padding of a pass."""

    def __add__(self, other: PackedTokens) -> PackedTokens:
        return PackedTokens(tokens=self.tokens + other.tokens, packed_tokens=self.packed_tokens + other.packed_tokens)


class MegatronPasses:
    """Runs micro-batches through the stages of one model."""

    def __init__(
        self,
        model: MegatronModel,
        *,
        temperature: float,
        chunk_tokens: int,
        training: DistributedDataParallel | None = None,
        value_head: ValueHead | None = None,
    ) -> None:
        """`training` wraps the model if it needs gradients; logits are computed for `chunk_tokens` at a time."""
        self.model = model
        self.work = PackedTokens()
        """Work since `restart`."""
        self.training = training
        self._temperature = temperature
        self._chunk_tokens = chunk_tokens
        self._value_head = value_head

    def restart(self) -> None:
        """Set the count of work to zero."""
        self.work = PackedTokens()

    def backward(self, micros: Sequence[MicroBatch], algorithm: Algorithm, scale: float) -> list[Measured]:
        """Add up the gradients of `scale` times the loss over all micro-batches of all shares.

        Returns the measurements; the list is empty except on the last stage.
        """
        measured: list[Measured] = []

        def loss(number: int, scores: TokenScores) -> Tensor:
            loss, found = policy_loss(scores, micros[number], algorithm, scale)
            measured.append(found)
            return loss

        def loss_gradients(number: int) -> LossGradients | None:
            # the loss that reaches the scores is multiplied by the number of shares, over which Megatron averages
            return precomputed_loss_gradients(micros[number], algorithm, self.model.place.data.size * scale)

        self._backward([micro.row for micro in micros], loss, loss_gradients)
        return measured

    def backward_of_row(self, row: PackedRow, loss: Callable[[TokenScores], Tensor]) -> None:
        """Add up the gradients of the sum of `loss` over one row of each share."""
        self._backward([row], lambda _, scores: loss(scores), _unknown)

    @torch.no_grad()
    def scores(self, micros: Sequence[MicroBatch]) -> list[tuple[MicroBatch, TokenScores]]:
        """The scores of each micro-batch on the last stage; empty on others."""
        found: list[tuple[MicroBatch, TokenScores]] = []

        def keep(number: int, scores: TokenScores) -> Tensor:
            found.append((micros[number], scores))
            return torch.zeros((), device=self.model.device)

        rows = [micro.row for micro in micros]
        self._run(rows, keep, _unknown, self.training or self.model.chunk, forward_only=True)
        return found

    def _backward(self, packed: Sequence[PackedRow], loss: LossOfRow, loss_gradients: LossGradientsOfRow) -> None:
        assert self.training is not None, "a backward pass of a model that is not trained"
        # Megatron takes the mean over micro-batches and over shares
        factor = len(packed) * self.model.place.data.size
        self._run(
            packed,
            lambda number, scores: factor * loss(number, scores),
            loss_gradients,
            self.training,
            forward_only=False,
        )

    def _run(
        self,
        packed: Sequence[PackedRow],
        loss: LossOfRow,
        loss_gradients: LossGradientsOfRow,
        module: Any,
        *,
        forward_only: bool,
    ) -> None:
        if not packed:
            return

        def step(iterator: Iterator[tuple[int, PackedRow]], module: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            number, row = next(iterator)
            rows = self.model.pack(_rows(row, self.model))
            states = self.model.states(module, rows)
            self.work += PackedTokens(tokens=row.num_tokens, packed_tokens=rows.num_tokens)

            def of_states(states_N1E: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                return loss(number, self._scores(row, states_N1E[rows.hidden_index_U, 0], loss_gradients(number))), {}

            return states, of_states

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=enumerate(packed),
            model=[module],
            num_microbatches=len(packed),
            seq_length=1,  # not read: lengths are sent with the tensors (variable_seq_lengths)
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _scores(self, row: PackedRow, hidden_UE: Tensor, loss_gradients: LossGradients | None) -> TokenScores:
        head = self.model.head
        # Megatron returns the last stage's states in float32 even for a 16-bit model
        hidden_UE = hidden_UE.to(head.dtype)
        of = VocabularySlice.of_rank(
            parallel_state.get_tensor_model_parallel_rank(),
            len(head),
            self.model.shape.banned_K,
            parallel_state.get_tensor_model_parallel_group(),
        )
        scores = sharded_token_scores(
            # its gradient is this rank's part of the sum over the vocabulary
            copy_to_tensor_model_parallel_region(hidden_UE),
            head,
            row.target_ids_U,
            of,
            temperature=self._temperature,
            chunk_tokens=self._chunk_tokens,
            loss_gradients=loss_gradients,
        )
        if self._value_head is not None:
            scores = replace(scores, values_A=self._value_head(hidden_UE))
        return scores.at(row.computed_A)


def _unknown(_: int) -> None:
    """No precomputed gradients, for supervised fine-tuning and for passes without gradients."""


def _rows(row: PackedRow, model: MegatronModel) -> list[PlainRow]:
    """One row for each distinct completion; without any, one row without actions to keep in step with other ranks."""
    rows = list(plain_rows(row, model.shape.family))
    return rows or [PlainRow(token_ids_L=row.token_ids_N, images=row.images, hidden_index_A=[])]
