"""Continuous batching: the running completions of all requests are rows of one decode batch without holes.

The state of all rows is in tensors on the device, so that a decode step launches the same few operators for any number
of rows; Python handles individual rows only when some have finished.

Axes: `B` rows of the batch, `T` tokens of a completion plus one scratch column, `P` prompts, `W` vocabulary,
`K` banned ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fovea.models.activation_tape import NOT_RECORDED
from fovea.models.transfer import to_device
from fovea.rollout.embedded.cache import Moves, fill_holes
from fovea.rollout.embedded.requests import DecodeRow, QueuedRequest, RemovedRow
from fovea.rollout.embedded.sampler import Draw, RowSettings, needs_of, row_settings, sample_tokens, uniforms
from fovea.rollout.outputs import CompletionText, make_completion
from fovea.types import Completion
from fovea.utils.host_waits import awaited
from fovea.utils.tensor_records import map_tensors
from fovea_gym.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class RowState:
    """Device state of the batch: one entry per row, updated in place."""

    length_B: Tensor
    """Number of sampled tokens."""
    limit_B: Tensor
    """Maximum number of tokens."""
    running_B: Tensor
    stopped_B: Tensor
    first_position_B: Tensor
    """Position of the completion's first token, equal on all axes."""
    token_B: Tensor
    """The newest token, which is the input of the next decode step."""
    uniforms_BT: Tensor
    """Uniform random number with which each token is sampled."""
    tokens_BT: Tensor
    logprobs_BT: Tensor
    places_BT: Tensor
    """Activation-tape place of each token that was fed to the network (`recorder`)."""
    settings: RowSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """Inputs of one decode step for all rows."""

    token_B: Tensor
    position_B: Tensor
    stored_B: Tensor
    """Number of completion tokens in the KV cache."""
    longest: int
    """Upper bound of `stored_B` over running rows, known without waiting for the device."""
    level: bool
    """True if `stored_B` is equal in all running rows."""
    draw: Draw


Forward = Callable[[DecodeStep], tuple[Tensor, Tensor]]
"""Runs the network and the sampler; returns the next token [B] of every row and its log-prob [B] (`sample_tokens`)."""


def completion_of(finished: RemovedRow, text: CompletionText, version: int) -> Completion:
    """Build the completion of a finished row; EngineError if its log-probs are not finite."""
    row = finished.row
    finish: FinishReason = "stop" if finished.stopped else "length"
    return make_completion(
        row.request.request, row.index, finished.token_ids_T, finished.logprobs_T, finish, text, version
    )


class DecodeBatch:
    """Rows that decode together, in the order of the KV cache's rows."""

    def __init__(self, device: torch.device, stop_ids: Tensor, banned_K: Tensor, text: CompletionText) -> None:
        self.rows: list[DecodeRow] = []
        self._device, self._stop_ids, self._banned_K, self._text = device, stop_ids, banned_K, text
        self._state: RowState | None = None
        self._needs = needs_of([])
        self._rows_with_stop: list[int] = []
        """Indices of the rows that may end by their text: by a stop string or at the end of the answer."""
        self._steps = self._longest = self._limit = 0
        self._level = True

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, groups: Sequence[Sequence[QueuedRequest]], logits_PW: Tensor) -> None:
        """Append a row per completion of these requests; the prefill's logits give their first tokens."""
        first = len(self.rows)
        rows = [
            DecodeRow(request=request, index=i, first_step=self._steps)
            for group in groups
            for request in group
            for i in range(request.n)
        ]
        self._append(rows, _new_rows(rows, self._device))
        prompt_of_B = [prompt for prompt, group in enumerate(groups) for _ in range(sum(each.n for each in group))]
        # the completions of a prompt share the logits of its prefill
        logits_BW = logits_PW[to_device(torch.tensor(prompt_of_B), self._device)]
        self._record(*sample_tokens(logits_BW, self._draw(first)), first)

    def resume(self, preempted: Sequence[RemovedRow]) -> None:
        """Append preempted rows in their previous state; the next step feeds the newest token of each."""
        for each in preempted:
            # as if the row had sampled a token in every step, so that `_num_tokens` needs no separate count per row
            each.row.first_step = self._steps + 1 - len(each.token_ids_T)
        rows = [each.row for each in preempted]
        self._append(rows, _restored(_new_rows(rows, torch.device("cpu")), preempted, self._device))

    def step(self, forward: Forward, first_place: int = NOT_RECORDED) -> None:
        """Sample one more token per row; `first_place` is the tape place of row 0's activations, if recorded."""
        state = self._live_state()
        # the newest token is not in the KV cache yet, because this step feeds it
        stored_B = state.length_B - 1
        if first_place != NOT_RECORDED:
            row_B = torch.arange(len(stored_B), device=self._device)
            # the tape stores the rows of a step in order
            state.places_BT[row_B, stored_B] = first_place + row_B
        step = DecodeStep(
            token_B=state.token_B,
            position_B=state.first_position_B + stored_B,
            stored_B=stored_B,
            longest=self._longest - 1,
            level=self._level,
            draw=self._draw(0),
        )
        self._record(*forward(step), 0)
        # an upper bound on the host, since reading the exact maximum would wait for the device at every step
        self._longest = min(self._longest + 1, self._limit)
        self._steps += 1

    def tokens_after(self, steps: int) -> list[int]:
        """Upper bound of each row's completion tokens in the KV cache after this many further steps."""
        return [min(self._num_tokens(row) - 1 + steps, row.request.limit_tokens) for row in self.rows]

    def wait_for_finished(self) -> list[int]:
        """Wait for the device and return the indices of the finished rows; decode steps do not wait."""
        if self._rows_with_stop:
            lengths = awaited(self._live_state().length_B[self._rows_with_stop]).tolist()
            for index, length in zip(self._rows_with_stop, lengths, strict=True):
                self._cut_at_string(index, length)
                self._cut_after_answer(index, length)
        running: list[bool] = awaited(self._live_state().running_B).tolist()
        return [index for index, is_running in enumerate(running) if not is_running]

    def num_stored(self, indices: Sequence[int]) -> list[int]:
        """Completion tokens of these rows in the KV cache: all but the last, which was never fed to the network."""
        lengths: list[int] = awaited(self._live_state().length_B).tolist()
        return [lengths[index] - 1 for index in indices]

    def remove(self, indices: Sequence[int]) -> list[RemovedRow]:
        """Remove finished or preempted rows, close the holes, and return the results of the removed rows."""
        state = self._live_state()
        results = _results(state, [self.rows[index] for index in indices], indices)
        moves = fill_holes(len(self.rows), indices)
        moves.in_list(self.rows)
        # the KV cache compacts by the same moves, so that row indices agree
        self._state = map_tensors(lambda x: _move(x, moves), state)
        if self.rows:
            self._refresh()
        return results

    def _append(self, rows: Sequence[DecodeRow], new: RowState) -> None:
        self.rows.extend(rows)
        self._state = new if self._state is None else map_tensors(_stack, self._state, new)
        self._refresh()

    def _live_state(self) -> RowState:
        assert self._state is not None, "a decode step of an empty batch"
        return self._state

    def _draw(self, first: int) -> Draw:
        """Build the sampler's inputs for the next token of the rows from `first` on."""
        state = self._live_state()
        length_B = state.length_B[first:]
        return Draw(
            uniform_B=state.uniforms_BT[first:][torch.arange(len(length_B), device=self._device), length_B],
            settings=map_tensors(lambda x: x[first:], state.settings),
            needs=self._needs,
            banned_K=self._banned_K,
        )

    def _record(self, token_B: Tensor, logprob_B: Tensor, first: int) -> None:
        """Append these tokens to the running rows from `first` on, and mark the rows that finish with them."""
        # views, so that the writes below change the batch
        state = map_tensors(lambda x: x[first:], self._live_state())
        row_B, column_B = torch.arange(len(state.length_B), device=self._device), state.length_B
        state.tokens_BT[row_B, column_B] = token_B
        state.logprobs_BT[row_B, column_B] = logprob_B
        state.token_B.copy_(token_B)
        # a finished row keeps its length, so that it always overwrites the same column
        state.length_B.add_(state.running_B)
        stopped_B = state.running_B & torch.isin(token_B, self._stop_ids)
        state.stopped_B.logical_or_(stopped_B)
        state.running_B.logical_and_(~stopped_B & (state.length_B < state.limit_B))

    def _cut_at_string(self, index: int, length: int) -> None:
        """Finish a row at the first token that completes a stop string; it counts as stopped even at its limit."""
        row, state = self.rows[index], self._live_state()
        stop = row.request.sampling.stop
        if not stop:
            return
        # a stop string may begin in tokens that were searched before
        start = max(0, row.searched_tokens - self._text.tail_tokens(stop))
        tokens = awaited(state.tokens_BT[index, start:length]).tolist()
        # checked token by token, since there may be several decode steps between two waits
        for end in range(row.searched_tokens + 1, length + 1):
            if self._text.holds_stop(tokens[: end - start], stop):
                self._stop(index, end)
                break
        row.searched_tokens = length

    def _cut_after_answer(self, index: int, length: int) -> None:
        """Finish a row at the token that closes its answer; it counts as stopped even at its limit."""
        row = self.rows[index]
        end = row.request.sampling.answer_end
        if end is None:
            return
        tokens = awaited(self._live_state().tokens_BT[index, row.answer_from : length]).tolist()
        if (num_tokens := self._text.answer_tokens(tokens, end)) is not None:
            self._stop(index, row.answer_from + num_tokens)
        else:
            row.answer_from += self._text.first_answer_token(tokens, end)

    def _stop(self, index: int, length: int) -> None:
        """Finish a row at this length, or earlier if it has already finished."""
        state = self._live_state()
        state.length_B[index].clamp_(max=length)
        state.stopped_B[index] = True
        state.running_B[index] = False

    def _refresh(self) -> None:
        """Recompute the values for the whole batch after rows were added or removed."""
        requests = {row.request for row in self.rows}
        self._needs = needs_of([request.sampling for request in requests])
        self._limit = max(request.limit_tokens for request in requests)
        self._rows_with_stop = [
            index for index, row in enumerate(self.rows) if row.request.sampling.stop or row.request.sampling.answer_end
        ]
        counts = {self._num_tokens(row) for row in self.rows}
        self._longest, self._level = max(counts), len(counts) == 1

    def _num_tokens(self, row: DecodeRow) -> int:
        """Upper bound of the number of tokens of a row, known without waiting for the device."""
        return self._steps + 1 - row.first_step


def _new_rows(rows: Sequence[DecodeRow], device: torch.device) -> RowState:
    """State of new rows, which have no tokens yet."""
    requests = [row.request for row in rows]
    # one scratch column, into which a row keeps sampling after it has finished at its limit
    room = max(request.limit_tokens for request in requests) + 1
    # all random numbers of a request at once, so that they do not depend on the other rows of the batch
    numbers = {r: torch.from_numpy(uniforms(r.sampling.seed, r.n, r.limit_tokens)) for r in dict.fromkeys(requests)}
    own = [numbers[row.request][row.index] for row in rows]
    uniforms_BT = to_device(torch.stack([F.pad(u, (0, room - len(u))) for u in own]), device)
    limit_B, first_position_B = (
        to_device(torch.tensor(column), device)
        for column in zip(*((r.limit_tokens, r.first_position) for r in requests), strict=True)
    )
    return RowState(
        length_B=torch.zeros_like(limit_B),
        limit_B=limit_B,
        running_B=torch.ones_like(limit_B, dtype=torch.bool),
        stopped_B=torch.zeros_like(limit_B, dtype=torch.bool),
        first_position_B=first_position_B,
        token_B=torch.zeros_like(limit_B),
        uniforms_BT=uniforms_BT,
        tokens_BT=torch.zeros_like(uniforms_BT, dtype=torch.long),
        logprobs_BT=torch.zeros_like(uniforms_BT, dtype=torch.float32),
        places_BT=torch.full_like(uniforms_BT, NOT_RECORDED, dtype=torch.long),
        settings=row_settings([request.sampling for request in requests], device),
    )


def _restored(new: RowState, preempted: Sequence[RemovedRow], device: torch.device) -> RowState:
    """State of resumed rows on the device; overwrites `new`, their state on the host without tokens."""
    for index, each in enumerate(preempted):
        length = len(each.token_ids_T)
        new.length_B[index], new.token_B[index] = length, int(each.token_ids_T[-1])
        new.tokens_BT[index, :length] = torch.from_numpy(each.token_ids_T)
        new.logprobs_BT[index, :length] = torch.from_numpy(each.logprobs_T)
        new.places_BT[index, : length - 1] = torch.from_numpy(each.places_T)
    return map_tensors(lambda x: to_device(x, device), new)


def _results(state: RowState, rows: Sequence[DecodeRow], indices: Sequence[int]) -> list[RemovedRow]:
    """Copy the results of these rows to the host in two transfers, one of integers and one of log-probs."""
    index = to_device(torch.tensor(indices), state.length_B.device)
    of_rows = map_tensors(lambda x: x[index], state)
    # concatenated, since the host waits for the device at every transfer
    columns = (of_rows.length_B[:, None], of_rows.stopped_B[:, None], of_rows.tokens_BT, of_rows.places_BT)
    numbers, logprobs = awaited(torch.cat(columns, dim=1)).cpu().numpy(), awaited(of_rows.logprobs_BT).cpu().numpy()
    lengths, stopped = numbers[:, 0].tolist(), (numbers[:, 1] > 0).tolist()
    tokens, places = np.split(numbers[:, 2:], 2, axis=1)
    return [
        RemovedRow(
            row=row,
            token_ids_T=tokens[i, :length].copy(),
            logprobs_T=logprobs[i, :length].copy(),
            stopped=stopped[i],
            places_T=places[i, : length - 1].copy(),
        )
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True))
    ]


def _stack(first: Tensor, second: Tensor) -> Tensor:
    """Concatenate rows; tensors with a T axis are padded to the longer one."""
    if first.ndim == 1:
        return torch.cat([first, second])
    longest = max(first.shape[1], second.shape[1])
    return torch.cat([F.pad(x, (0, longest - x.shape[1])) for x in (first, second)])


def _move(rows: Tensor, moves: Moves) -> Tensor:
    """Compact rows in place; returns a view of the remaining ones."""
    if moves.sources:
        sources, targets = moves.index(rows.device)
        rows[targets] = rows[sources]
    return rows[: moves.count]
