"""The dense KV cache: one buffer of padded rows for prompts, each stored once, and one for completions.

Both buffers are compacted when rows finish, and grow by doubling, in rows and in tokens, instead of reserving the full
length: memory stays within a small multiple of what is in use.

Axes: `B` rows of the decode batch, `J` key heads, `D` width of a head, `N` tokens of a prefill pass, `T` capacity in
tokens, `X` rows of a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fovea.models.decoder import Attend, DecoderShape
from fovea.models.transfer import to_device
from fovea.rollout.embedded.cache import Store, TokenSpan
from fovea.rollout.embedded.compaction import Moves, fill_holes, grown_capacity
from fovea.rollout.embedded.dense_attention import DenseAttention, Sharing, length_mask, sharing
from fovea.rollout.embedded.requests import QueuedRequest

FIRST_TOKENS = 64
"""Initial capacity of a completion: many answers are shorter, and each doubling costs a copy."""


class KeyValues:
    """Growing buffers [2, X, J, T, D] of keys and values, one per layer."""

    def __init__(self, shape: DecoderShape, like: Tensor) -> None:
        empty = like.new_zeros(2, 0, shape.num_kv_heads, 0, shape.head_dim)
        self.layers = [empty] * shape.num_layers

    @property
    def rows(self) -> int:
        return self.layers[0].shape[1]

    @property
    def room(self) -> int:
        """Capacity of a row in tokens."""
        return self.layers[0].shape[3]

    def reserve(self, rows: int, tokens: int, *, live: tuple[int, int], most_tokens: int) -> None:
        """Grow the buffers to this capacity, keeping the `live` (rows, tokens) part; does nothing if it suffices.

        A dimension that must grow doubles, tokens up to `most_tokens`.
        """
        if rows <= self.rows and tokens <= self.room:
            return
        two, _, heads, _, width = self.layers[0].shape
        # the dimension that need not grow shrinks to what is asked for: many short rows, then a few long ones, must not
        # add up to many long ones
        new_rows = rows if rows <= self.rows else grown_capacity(self.rows, rows)
        new_tokens = tokens if tokens <= self.room else min(grown_capacity(self.room, tokens), most_tokens)
        kept_rows, kept_tokens = live
        for layer, old in enumerate(self.layers):
            # zeros, since a masked position must not hold NaN: 0 * NaN is NaN
            new = old.new_zeros(two, new_rows, heads, new_tokens, width)
            new[:, :kept_rows, :, :kept_tokens] = old[:, :kept_rows, :, :kept_tokens]
            self.layers[layer] = new

    def move(self, moves: Moves, tokens: int) -> None:
        """Compact the rows; only the first `tokens` of each are copied."""
        if not moves.sources:
            return
        sources, targets = moves.index(self.layers[0].device)
        for layer in self.layers:
            used = layer[:, :, :, :tokens]
            # safe in place: sources and targets never overlap
            used[:, targets] = used[:, sources]


class DenseCache:
    """KV cache for plain matrix products: for CPUs, and devices without a paged kernel.

    A request is admitted at its worst case, so that no row is ever preempted: activations on the tape stay in order.
    """

    def __init__(self, shape: DecoderShape, like: Tensor, *, num_tokens: int) -> None:
        self._shape, self._like, self._num_tokens = shape, like.new_empty(0), num_tokens
        self.clear()

    def clear(self) -> None:
        # new, empty buffers: the update needs the memory between rollouts
        shape, like = self._shape, self._like
        self._prompts = KeyValues(shape, like)
        self._own = KeyValues(shape, like)
        self._prompt_lengths: list[int] = []
        self._prompt_of_row: list[int] = []
        self._limits: list[int] = []
        self._used_tokens = 0
        # computed when first needed after rows came or went
        self._sharing: Sharing | None = None

    def cost(self, request: QueuedRequest) -> int:
        return request.prompt.num_tokens + request.n * request.limit_tokens

    def fits(self, requests: Sequence[QueuedRequest]) -> bool:
        prompts = [*self._prompt_lengths, *(request.prompt.num_tokens for request in requests)]
        limits = [*self._limits, *(request.limit_tokens for request in requests for _ in range(request.n))]
        # padded to the longest of each, as the buffers are
        return len(prompts) * max(prompts) + len(limits) * max(limits) <= self._num_tokens

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
        # prompts of a task are about as long as each other: a quarter of headroom instead of a doubling
        self._prompts.reserve(
            len(self._prompt_lengths), longest_now, live=(first, longest), most_tokens=longest_now + longest_now // 4
        )
        needed = max(min(FIRST_TOKENS, limit), self._used_tokens)
        self._own.reserve(len(self._prompt_of_row), needed, live=(rows, self._used_tokens), most_tokens=limit)
        self._sharing = None
        return first

    def writer(self, spans: Sequence[TokenSpan]) -> Store:
        device = self._like.device
        prompt_N = to_device(torch.cat([torch.full((span.end - span.start,), span.prompt) for span in spans]), device)
        token_N = torch.cat([torch.arange(span.start, span.end) for span in spans]).to(device)

        def store(layer: int, key_NJD: Tensor, value_NJD: Tensor) -> None:
            keys, values = self._prompts.layers[layer]
            keys[prompt_N, :, token_N] = key_NJD
            values[prompt_N, :, token_N] = value_NJD

        return store

    def prompt(self, layer: int, span: TokenSpan) -> tuple[Tensor, Tensor]:
        # a view, not a copy
        keys, values = self._prompts.layers[layer][:, span.prompt, :, : span.end]
        return keys, values

    def copy_row(self, row: int, tokens: int) -> list[Tensor]:
        prompt = self._prompt_of_row[row]
        length = self._prompt_lengths[prompt]
        pairs = zip(self._prompts.layers, self._own.layers, strict=True)
        return [torch.cat([prompts[:, prompt, :, :length], own[:, row, :, :tokens]], dim=2) for prompts, own in pairs]

    def remove(self, finished: Sequence[int]) -> None:
        moves = fill_holes(len(self._prompt_of_row), finished)
        self._own.move(moves, self._used_tokens)
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
