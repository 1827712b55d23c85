"""The dense KV cache: one buffer of padded rows for prompts, each stored once, and one for completions.

Both buffers are compacted when rows finish, and grow in rows and tokens by doubling instead of reserving the full
length, so that their memory stays within a small multiple of what is in use.

Axes: `B` rows of the decode batch, `J` key heads, `D` width of a head, `N` tokens of a prefill pass, `T` capacity in
tokens, `X` rows of a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fovea.models.decoder import Attend, DecoderShape
from fovea.models.transfer import to_device
from fovea.rollout.embedded.cache import Load, Moves, Store, TokenSpan, fill_holes, grown_capacity
from fovea.rollout.embedded.requests import QueuedRequest
from fovea.rollout.embedded.states import DeltaStates


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Index tensors that group the rows of the batch by prompt."""

    row_PG: Tensor
    """Row indices of each prompt; padding points to row 0."""
    flat_index_B: Tensor
    """Index of each row in the flattened `row_PG`."""
    in_order: bool
    """True if all groups have the same size and contiguous rows, so that a reshape replaces both index operations."""
    longest: int
    """Number of tokens of the longest prompt."""
    mask_P11L: Tensor | None
    """Additive mask, -inf after the end of each prompt; None if all prompts are equally long."""


def sharing(prompt_of_row: Sequence[int], prompt_lengths: Sequence[int], device: torch.device) -> Sharing:
    """Group rows by prompt; the rows may be in any order, for example after compaction."""
    prompt_B = torch.tensor(prompt_of_row)
    count_P = torch.bincount(prompt_B, minlength=len(prompt_lengths))
    order_B = prompt_B.argsort(stable=True)
    first_P = count_P.cumsum(0) - count_P
    # index of each row among the rows of its prompt
    rank_B = torch.empty_like(order_B)
    rank_B[order_B] = torch.arange(len(order_B)) - first_P[prompt_B[order_B]]
    row_PG = torch.zeros(len(prompt_lengths), int(count_P.max()), dtype=torch.long)
    row_PG[prompt_B, rank_B] = torch.arange(len(prompt_B))
    lengths_P = torch.tensor(prompt_lengths)
    longest = max(prompt_lengths)
    uneven = min(prompt_lengths) < longest
    return Sharing(
        row_PG=to_device(row_PG, device),
        flat_index_B=to_device(prompt_B * row_PG.shape[1] + rank_B, device),
        in_order=torch.equal(row_PG.flatten(), torch.arange(len(prompt_B))),
        longest=longest,
        mask_P11L=length_mask(to_device(lengths_P, device), longest) if uneven else None,
    )


def length_mask(lengths_X: Tensor, size: int) -> Tensor:
    """Additive mask [X, 1, 1, size], -inf from each length on."""
    hidden = torch.arange(size, device=lengths_X.device) >= lengths_X[:, None]
    return torch.zeros(hidden.shape, device=lengths_X.device).masked_fill_(hidden, -torch.inf)[:, None, None]


class DenseAttention:
    """Attention of one decode step: one product per prompt for all of its rows, and one per row for its own tokens."""

    def __init__(
        self,
        prompts: Sequence[Tensor],
        own: Sequence[Tensor],
        shared: Sharing,
        stored_B: Tensor,
        own_mask: Tensor | None,
        scale: float,
    ) -> None:
        """`prompts` [2, P, J, L, D] and `own` [2, B, J, T, D] hold the keys and values of each layer."""
        self._prompts, self._own, self._shared, self._scale = prompts, own, shared, scale
        self._stored_B, self._own_mask = stored_B, own_mask
        self._row_B = torch.arange(len(stored_B), device=stored_B.device)

    def __call__(self, layer: int, query_BHD: Tensor, key_BJD: Tensor, value_BJD: Tensor) -> Tensor:
        """Store the new keys and values, and compute attention; returns [B, H, D]."""
        keys_BJTD, values_BJTD = self._own[layer]
        self._write(keys_BJTD, key_BJD)
        self._write(values_BJTD, value_BJD)
        query_BJQD = (query_BHD * self._scale).unflatten(1, (key_BJD.shape[1], -1))
        own, own_lse = _attend(query_BJQD, keys_BJTD, values_BJTD, self._own_mask)
        query_PJYD = self._by_prompt(query_BJQD).transpose(1, 2).flatten(2, 3)
        keys_PJLD, values_PJLD = self._prompts[layer]
        shared, shared_lse = (
            self._by_row(x) for x in _attend(query_PJYD, keys_PJLD, values_PJLD, self._shared.mask_P11L)
        )
        # a softmax over both parts is the average of their softmaxes, weighted by their sums of exponentials
        merged_BJQD = torch.lerp(shared, own, torch.sigmoid(own_lse - shared_lse))
        return merged_BJQD.flatten(1, 2).to(query_BHD.dtype)

    def _write(self, stored_BJTD: Tensor, new_BJD: Tensor) -> None:
        """Write the keys or values of this step, one token per row."""
        if self._own_mask is None:
            # all running rows are equally long and write to the last column; writes of finished rows are never read
            stored_BJTD[:, :, -1] = new_BJD
        else:
            stored_BJTD[self._row_B, :, self._stored_B] = new_BJD

    def _by_prompt(self, x_BJQD: Tensor) -> Tensor:
        """Group rows by prompt: [P, G, J, Q, D]."""
        if self._shared.in_order:
            return x_BJQD.reshape(*self._shared.row_PG.shape, *x_BJQD.shape[1:])
        return x_BJQD[self._shared.row_PG]

    def _by_row(self, x_PJYD: Tensor) -> Tensor:
        """Undo the grouping by prompt: [B, J, Q, D]."""
        x_PGJQD = x_PJYD.unflatten(2, (self._shared.row_PG.shape[1], -1)).transpose(1, 2)
        rows: Tensor = x_PGJQD.flatten(0, 1)
        return rows if self._shared.in_order else rows[self._shared.flat_index_B]


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention output and the log-sum-exp of its scores, both in float32."""
    scores = (query @ keys.mT).float()
    if mask is not None:
        scores += mask
    # not softmax and logsumexp, each of which would compute the maximum and the exponentials
    peak = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    return (weights.to(values.dtype) @ values).float().div_(total), total.log_().add_(peak)


FIRST_TOKENS = 64
"""Initial capacity of a completion in tokens: many answers are shorter, and each doubling costs a copy."""


class KeyValues:
    """Growing buffers [2, X, J, T, D] of keys and values, one per layer."""

    def __init__(self, shape: DecoderShape, like: Tensor) -> None:
        empty = like.new_zeros(2, 0, shape.num_kv_heads, 0, shape.head_dim)
        self.layers = [empty] * shape.num_attention_layers

    @property
    def rows(self) -> int:
        return self.layers[0].shape[1]

    @property
    def room(self) -> int:
        """Capacity of each row in tokens."""
        return self.layers[0].shape[3]

    def reserve(self, rows: int, tokens: int, *, live: tuple[int, int], most_tokens: int) -> None:
        """Grow the buffers to this capacity, keeping the `live` (rows, tokens) part; does nothing if there is room.

        A dimension that must grow at least doubles, but tokens grow to `most_tokens` at most.
        """
        if rows <= self.rows and tokens <= self.room:
            return
        two, _, heads, _, width = self.layers[0].shape
        # a dimension that need not grow shrinks to the requested size: many short rows, followed by a few long ones,
        # must not allocate many long ones
        new_rows = rows if rows <= self.rows else grown_capacity(self.rows, rows)
        new_tokens = tokens if tokens <= self.room else min(grown_capacity(self.room, tokens), most_tokens)
        kept_rows, kept_tokens = live
        for layer, old in enumerate(self.layers):
            # zeros, since masked positions must not hold NaN: 0 * NaN is NaN
            new = old.new_zeros(two, new_rows, heads, new_tokens, width)
            new[:, :kept_rows, :, :kept_tokens] = old[:, :kept_rows, :, :kept_tokens]
            self.layers[layer] = new

    def move(self, moves: Moves, tokens: int) -> None:
        """Compact the rows; copies only the first `tokens` of each row."""
        if not moves.sources:
            return
        sources, targets = moves.index(self.layers[0].device)
        for layer in self.layers:
            used = layer[:, :, :, :tokens]
            # safe in place, because sources and targets never overlap
            used[:, targets] = used[:, sources]


class DenseCache:
    """KV cache for plain matrix products, for CPUs and for devices without a paged kernel.

    A request is admitted only if its worst case fits. Rows are thus never preempted, and activations stay in order on
    the tape.
    """

    def __init__(self, shape: DecoderShape, like: Tensor, *, num_tokens: int) -> None:
        self._shape, self._like, self._num_tokens = shape, like.new_empty(0), num_tokens
        self.states = None if shape.delta is None or not any(shape.is_delta) else DeltaStates(shape.delta, like)
        self._state_tokens = shape.state_tokens(like.element_size())
        self.clear()

    def clear(self) -> None:
        # replaced by empty buffers, since the update needs the memory between rollouts
        shape, like = self._shape, self._like
        self._prompts = KeyValues(shape, like)
        self._own = KeyValues(shape, like)
        if self.states is not None:
            self.states.clear()
        self._prompt_lengths: list[int] = []
        self._prompt_of_row: list[int] = []
        self._limits: list[int] = []
        self._used_tokens = 0
        # computed when it is first needed after rows were added or removed
        self._sharing: Sharing | None = None

    def cost(self, request: QueuedRequest) -> int:
        return request.prompt.num_tokens + request.n * (request.limit_tokens + self._state_tokens)

    def fits(self, requests: Sequence[QueuedRequest]) -> bool:
        prompts = [*self._prompt_lengths, *(request.prompt.num_tokens for request in requests)]
        limits = [*self._limits, *(request.limit_tokens for request in requests for _ in range(request.n))]
        # padded to the longest prompt and row, as the buffers are
        return len(prompts) * max(prompts) + len(limits) * (max(limits) + self._state_tokens) <= self._num_tokens

    def reserve(self, tokens_B: Sequence[int]) -> bool:
        return True

    def add(self, requests: Sequence[QueuedRequest]) -> int:
        first, rows = len(self._prompt_lengths), len(self._prompt_of_row)
        longest = max(self._prompt_lengths, default=0)
        for index, request in enumerate(requests, start=first):
            self._prompt_lengths.append(request.prompt.num_tokens)
            self._prompt_of_row.extend([index] * request.n)
            self._limits.extend([request.limit_tokens] * request.n)
        longest_now, limit = max(self._prompt_lengths), max(self._limits)
        # prompts have similar lengths, so a quarter of headroom replaces the doubling
        self._prompts.reserve(
            len(self._prompt_lengths), longest_now, live=(first, longest), most_tokens=longest_now + longest_now // 4
        )
        needed = max(min(FIRST_TOKENS, limit), self._used_tokens)
        self._own.reserve(len(self._prompt_of_row), needed, live=(rows, self._used_tokens), most_tokens=limit)
        self._sharing = None
        return first

    def writer(self, spans: Sequence[TokenSpan]) -> Store:
        prompt_N, token_N = self._index(spans)

        def store(layer: int, key_NJD: Tensor, value_NJD: Tensor) -> None:
            keys, values = self._prompts.layers[layer]
            keys[prompt_N, :, token_N] = key_NJD
            values[prompt_N, :, token_N] = value_NJD

        return store

    def reader(self, spans: Sequence[TokenSpan]) -> Load:
        prompt_M, token_M = self._index([replace(span, start=0) for span in spans])

        def load(layer: int) -> tuple[Tensor, Tensor]:
            keys, values = self._prompts.layers[layer]
            return keys[prompt_M, :, token_M], values[prompt_M, :, token_M]

        return load

    def _index(self, spans: Sequence[TokenSpan]) -> tuple[Tensor, Tensor]:
        """Index of the prompt, and place in it, of each token of the spans."""
        prompt_N = torch.cat([torch.full((span.end - span.start,), span.prompt) for span in spans])
        token_N = torch.cat([torch.arange(span.start, span.end) for span in spans])
        return to_device(prompt_N, self._like.device), to_device(token_N, self._like.device)

    def copy_row(self, row: int, tokens: int) -> list[Tensor]:
        prompt = self._prompt_of_row[row]
        length = self._prompt_lengths[prompt]
        pairs = zip(self._prompts.layers, self._own.layers, strict=True)
        return [torch.cat([prompts[:, prompt, :, :length], own[:, row, :, :tokens]], dim=2) for prompts, own in pairs]

    def remove(self, finished: Sequence[int]) -> None:
        moves = fill_holes(len(self._prompt_of_row), finished)
        self._own.move(moves, self._used_tokens)
        if self.states is not None:
            self.states.remove(moves)
        moves.in_list(self._prompt_of_row)
        moves.in_list(self._limits)
        alive = set(self._prompt_of_row)
        self._remove_prompts([prompt for prompt in range(len(self._prompt_lengths)) if prompt not in alive])
        self._sharing = None

    def _remove_prompts(self, finished: Sequence[int]) -> None:
        moves = fill_holes(len(self._prompt_lengths), finished)
        self._prompts.move(moves, max(self._prompt_lengths))
        moves.in_list(self._prompt_lengths)
        moved = dict(zip(moves.sources, moves.targets, strict=True))
        self._prompt_of_row = [moved.get(prompt, prompt) for prompt in self._prompt_of_row]

    def step(self, stored_B: Tensor, longest: int, level: bool) -> Attend:
        tokens, room = longest + 1, self._own.room
        if tokens > room:
            live = (len(self._prompt_of_row), min(self._used_tokens, room))
            self._own.reserve(live[0], tokens, live=live, most_tokens=max(*self._limits, tokens))
        self._used_tokens = tokens
        if self._sharing is None:
            self._sharing = sharing(self._prompt_of_row, self._prompt_lengths, stored_B.device)
        prompts, longest_prompt = len(self._prompt_lengths), self._sharing.longest
        return DenseAttention(
            [layer[:, :prompts, :, :longest_prompt] for layer in self._prompts.layers],
            [layer[:, : len(stored_B), :, :tokens] for layer in self._own.layers],
            self._sharing,
            stored_B,
            None if level else length_mask(stored_B + 1, tokens),
            self._shape.scale,
        )
