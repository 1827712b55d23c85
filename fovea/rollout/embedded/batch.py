"""The completions that are being drawn: one row each, dense, whatever group they belong to.

A row's tensors say all that a decoding step needs to know of it, so that a step is the same few operations however
many rows run. Python looks at single rows only when some end.

Axes: `B` live completions, `T` tokens of a completion and one more column, which takes what an ended row goes on to
draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fovea.errors import EngineError
from fovea.models.activation_tape import NOT_RECORDED
from fovea.rollout.embedded.cache import QueuedRequest
from fovea.rollout.embedded.compaction import Moves, fill_holes
from fovea.rollout.embedded.detokenizer import CompletionText
from fovea.rollout.embedded.sampler import Bans, RowSettings, draw, needs_of, row_settings, uniforms
from fovea.types import Completion


@dataclass(slots=True, eq=False)
class Row:
    """One completion of a request that runs."""

    request: QueuedRequest
    index: int
    seen: int = 0
    """Tokens that were searched for stop strings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What came of a row."""

    row: Row
    token_ids_T: NDArray[np.int64]
    logprobs_T: NDArray[np.float32]
    stopped: bool
    """By a stop token or string, not by length."""
    places_T: NDArray[np.int64]
    """Of all tokens but the last, which is never fed back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowState:
    """One entry per live row, written in place."""

    length_B: Tensor
    """Tokens drawn."""
    limit_B: Tensor
    running_B: Tensor
    stopped_B: Tensor
    first_position_B: Tensor
    """Of the completion's first token."""
    token_B: Tensor
    """The newest."""
    uniforms_BT: Tensor
    tokens_BT: Tensor
    logprobs_BT: Tensor
    places_BT: Tensor
    """Where the linear outputs of each token that was fed back are kept (`recorder`)."""
    settings: RowSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the next forward pass of every row starts from."""

    token_B: Tensor
    position_B: Tensor
    stored_B: Tensor
    """Tokens of the completion whose keys are in the cache."""
    longest: int
    """The largest of them among rows that run, or more."""
    level: bool
    """They are equal in all rows that run."""


Forward = Callable[[Step], Tensor]
"""Logits [B, W] in float32."""

State = TypeVar("State", RowState, RowSettings)


def completion_id(ended: Ended) -> str:
    """The request's id and the number among its completions."""
    return f"{ended.row.request.request.id}/{ended.row.index}"


def completion_of(ended: Ended, text: CompletionText, version: int) -> Completion:
    """The completion of a row; EngineError when its log-probs are not finite."""
    if not np.isfinite(ended.logprobs_T).all():
        raise EngineError(
            "the model's logits are not finite, so that nothing can be drawn from them: the weights have diverged; "
            "resume from an earlier checkpoint with a lower train.learning_rate"
        )
    request = ended.row.request
    return Completion(
        id=completion_id(ended),
        token_ids_T=ended.token_ids_T,
        logprobs_T=ended.logprobs_T,
        text=text.decode(ended.token_ids_T.tolist(), request.sampling.stop),
        finish="stop" if ended.stopped else "length",
        version=version,
    )


class Batch:
    """Live rows, in the same order as the cache's."""

    def __init__(self, device: torch.device, stop_ids: Tensor, bans: Bans, text: CompletionText) -> None:
        self.rows: list[Row] = []
        self._device, self._stop_ids, self._bans, self._text = device, stop_ids, bans, text
        self._state: RowState | None = None
        self._needs = needs_of([])
        self._watched: list[int] = []
        """Rows with stop strings."""
        self._longest = self._limit = 0
        self._level = True

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, requests: Sequence[QueuedRequest], logits_PW: Tensor) -> None:
        """Rows for all completions of these behind the live ones, and their first tokens."""
        first = len(self.rows)
        self.rows.extend(Row(request=request, index=i) for request in requests for i in range(request.n))
        new = _new_rows(requests, self._device)
        self._state = new if self._state is None else _map(_stack, self._state, new)
        self._refresh()
        counts = torch.tensor([request.n for request in requests], device=self._device)
        self._record(logits_PW.repeat_interleave(counts, 0), first)
        self._measure()

    def step(self, forward: Forward, first_place: int = NOT_RECORDED) -> None:
        """One more token for every row; `forward` makes logits of what was drawn last, and is kept at `first_place`."""
        state = self._live_state()
        stored_B = state.length_B - 1
        if first_place != NOT_RECORDED:
            row_B = torch.arange(len(stored_B), device=self._device)
            state.places_BT[row_B, stored_B] = first_place + row_B
        step = Step(
            token_B=state.token_B,
            position_B=state.first_position_B + stored_B,
            stored_B=stored_B,
            longest=self._longest - 1,
            level=self._level,
        )
        self._record(forward(step), 0)
        self._longest = min(self._longest + 1, self._limit)

    def look(self) -> list[int]:
        """Which rows have ended: the one place where the host waits for the device."""
        for place, length in zip(self._watched, self._live_state().length_B[self._watched].tolist(), strict=True):
            self._cut_at_string(place, length)
        ended: list[int] = (~self._live_state().running_B).nonzero()[:, 0].tolist()
        return ended

    def num_stored(self, place: int) -> int:
        """Tokens of a row that were fed back: all but the last."""
        return int(self._live_state().length_B[place]) - 1

    def take(self, ended: Sequence[int]) -> list[Ended]:
        """Remove these rows, and say what came of them."""
        state = self._live_state()
        results = _results(state, [self.rows[place] for place in ended], ended)
        moves = fill_holes(len(self.rows), ended)
        moves.in_list(self.rows)
        self._state = _map(lambda x: _move(x, moves), state)
        if self.rows:
            self._refresh()
            self._measure()
        return results

    def _live_state(self) -> RowState:
        assert self._state is not None, "a batch without rows was asked to go on"
        return self._state

    def _record(self, logits_BW: Tensor, first: int) -> None:
        """Draw and write the next token of rows from `first` on; note which ended.

        A row that has ended goes on drawing behind its end until it leaves; nobody reads that.
        """
        state = _map(lambda x: x[first:], self._live_state())
        row_B, column_B = torch.arange(len(state.length_B), device=self._device), state.length_B
        uniform_B = state.uniforms_BT[row_B, column_B]
        token_B, logprob_B = draw(logits_BW, uniform_B, state.settings, self._needs, self._bans)
        state.tokens_BT[row_B, column_B] = token_B
        state.logprobs_BT[row_B, column_B] = logprob_B
        state.token_B.copy_(token_B)
        state.length_B.add_(state.running_B)
        stopped_B = state.running_B & torch.isin(token_B, self._stop_ids)
        state.stopped_B.logical_or_(stopped_B)
        state.running_B.logical_and_(~stopped_B & (state.length_B < state.limit_B))

    def _cut_at_string(self, place: int, length: int) -> None:
        """End a row at the first token that completes a stop string, be it the last that the limit allows."""
        row, state = self.rows[place], self._live_state()
        stop = row.request.sampling.stop
        start = max(0, row.seen - self._text.tail_tokens(stop))
        tokens = state.tokens_BT[place, start:length].tolist()
        for end in range(row.seen + 1, length + 1):
            if self._text.holds_stop(tokens[: end - start], stop):
                state.length_B[place] = end
                state.stopped_B[place] = True
                state.running_B[place] = False
                break
        row.seen = length

    def _refresh(self) -> None:
        """What a step needs to know of the rows as a whole, after some came or went."""
        requests = {row.request for row in self.rows}
        self._needs = needs_of([request.sampling for request in requests])
        self._limit = max(request.limit_tokens for request in requests)
        self._watched = [place for place, row in enumerate(self.rows) if row.request.sampling.stop]

    def _measure(self) -> None:
        shortest, longest = torch.stack(self._live_state().length_B.aminmax()).tolist()
        self._longest, self._level = longest, shortest == longest


def _new_rows(requests: Sequence[QueuedRequest], device: torch.device) -> RowState:
    """Rows without tokens."""

    def column(values: Sequence[int]) -> Tensor:
        numbers = torch.tensor(values, device=device)
        return numbers.repeat_interleave(torch.tensor([request.n for request in requests], device=device))

    room = max(request.limit_tokens for request in requests) + 1
    drawn = [uniforms(r.sampling.seed, r.n, r.limit_tokens) for r in requests]
    uniforms_BT = torch.cat([F.pad(torch.from_numpy(u), (0, room - u.shape[1])) for u in drawn]).to(device)
    limit_B = column([request.limit_tokens for request in requests])
    return RowState(
        length_B=torch.zeros_like(limit_B),
        limit_B=limit_B,
        running_B=torch.ones_like(limit_B, dtype=torch.bool),
        stopped_B=torch.zeros_like(limit_B, dtype=torch.bool),
        first_position_B=column([request.first_position for request in requests]),
        token_B=torch.zeros_like(limit_B),
        uniforms_BT=uniforms_BT,
        tokens_BT=torch.zeros_like(uniforms_BT, dtype=torch.long),
        logprobs_BT=torch.zeros_like(uniforms_BT, dtype=torch.float32),
        places_BT=torch.full_like(uniforms_BT, NOT_RECORDED, dtype=torch.long),
        settings=row_settings([request.sampling for request in requests for _ in range(request.n)], device),
    )


def _results(state: RowState, rows: Sequence[Row], places: Sequence[int]) -> list[Ended]:
    """In one transfer from the device for each tensor."""
    index = torch.tensor(places, device=state.length_B.device)
    lengths, stopped = state.length_B[index].tolist(), state.stopped_B[index].tolist()
    tokens, logprobs = state.tokens_BT[index].cpu().numpy(), state.logprobs_BT[index].cpu().numpy()
    kept = state.places_BT[index].cpu().numpy()
    return [
        Ended(
            row=row,
            token_ids_T=tokens[i, :length].copy(),
            logprobs_T=logprobs[i, :length].copy(),
            stopped=stopped[i],
            places_T=kept[i, : length - 1].copy(),
        )
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True))
    ]


def _stack(first: Tensor, second: Tensor) -> Tensor:
    """Rows of both; tensors over T get room for the longer."""
    if first.ndim == 1:
        return torch.cat([first, second])
    longest = max(first.shape[1], second.shape[1])
    return torch.cat([F.pad(x, (0, longest - x.shape[1])) for x in (first, second)])


def _move(rows: Tensor, moves: Moves) -> Tensor:
    """In place; a view of the rows that stay."""
    if moves.sources:
        sources, targets = moves.index(rows.device)
        rows[targets] = rows[sources]
    return rows[: moves.count]


def _map(make: Callable[..., Tensor], *states: State) -> State:
    """The same for every tensor of a state."""
    values: dict[str, Any] = {}
    for field in fields(states[0]):
        parts = [getattr(state, field.name) for state in states]
        values[field.name] = make(*parts) if isinstance(parts[0], Tensor) else _map(make, *parts)
    return type(states[0])(**values)
