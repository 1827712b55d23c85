"""The dense cache: each prompt's keys and values once, in a slot of its own, each completion's own in a row beside it.

Rows and slots are dense: when some end, the last ones move into their places. Room for tokens is not reserved at
full length: it starts small and doubles, so a completion is copied once per doubling. Rows double too, when requests
trickle in. What is held stays within a small multiple of what is used.

Axes: `B` live completions, `J` key heads, `D` width of a head, `N` tokens of a prefill row, `T` room for tokens,
`X` slots or rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fovea.models.decoder import Attend, DecoderShape
from fovea.rollout.embedded.cache import Demand, QueuedRequest, Store, TokenSpan
from fovea.rollout.embedded.compaction import Moves, fill_holes, grown_capacity
from fovea.rollout.embedded.dense_attention import DenseAttention, Sharing, length_mask, sharing

FIRST_TOKENS = 64
"""Room for tokens of a completion at first: many answers are shorter, and a doubling costs a copy."""


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
        """For tokens of a row."""
        return self.layers[0].shape[3]

    def reserve(self, rows: int, tokens: int, *, live: tuple[int, int], most_tokens: int) -> None:
        """Room for this many; what is `live` (rows, tokens) stays.

        What must grow doubles, tokens to `most_tokens` at most; the other side is cut to what is asked for, so that
        many short rows and, later, a few long ones do not add up to many long ones.
        """
        if rows <= self.rows and tokens <= self.room:
            return
        two, _, heads, _, width = self.layers[0].shape
        new_rows = rows if rows <= self.rows else grown_capacity(self.rows, rows)
        new_tokens = tokens if tokens <= self.room else min(grown_capacity(self.room, tokens), most_tokens)
        kept_rows, kept_tokens = live
        for layer, old in enumerate(self.layers):
            # zeros, since a masked position must not hold NaN: 0 * NaN is NaN
            new = old.new_zeros(two, new_rows, heads, new_tokens, width)
            new[:, :kept_rows, :, :kept_tokens] = old[:, :kept_rows, :, :kept_tokens]
            self.layers[layer] = new

    def move(self, moves: Moves, tokens: int) -> None:
        """Only the tokens in use are copied."""
        if not moves.sources:
            return
        sources, targets = moves.index(self.layers[0].device)
        for layer in self.layers:
            used = layer[:, :, :, :tokens]
            used[:, targets] = used[:, sources]


class DenseCache:
    """A dense cache for plain matrix products: what the CPU runs, and any device without a paged kernel."""

    def __init__(self, shape: DecoderShape, like: Tensor) -> None:
        self._shape, self._like = shape, like.new_empty(0)
        self.clear()

    def clear(self) -> None:
        """The memory is given back too: rollout and training take turns."""
        shape, like = self._shape, self._like
        self._prompts = KeyValues(shape, like)
        self._own = KeyValues(shape, like)
        self._prompt_lengths: list[int] = []
        self._prompt_of_row: list[int] = []
        self._limits: list[int] = []
        self._used_tokens = 0
        self._sharing: Sharing | None = None
        """Made anew after rows came or went."""

    def cost(self, demands: Sequence[Demand]) -> int:
        """Padded to the longest, since that is what is held."""
        prompt = max(demand.prompt_tokens for demand in demands)
        room = max(demand.limit_tokens for demand in demands)
        return len(demands) * prompt + sum(demand.rows for demand in demands) * room

    def add(self, requests: Sequence[QueuedRequest]) -> int:
        first, rows = len(self._prompt_lengths), len(self._prompt_of_row)
        longest = max(self._prompt_lengths, default=0)
        for place, request in enumerate(requests, start=first):
            self._prompt_lengths.append(request.prompt.num_tokens)
            self._prompt_of_row.extend([place] * request.n)
            self._limits.extend([request.limit_tokens] * request.n)
        longest_now, limit = max(self._prompt_lengths), max(self._limits)
        self._prompts.reserve(
            len(self._prompt_lengths), longest_now, live=(first, longest), most_tokens=longest_now + longest_now // 4
        )
        needed = max(min(FIRST_TOKENS, limit), self._used_tokens)
        self._own.reserve(len(self._prompt_of_row), needed, live=(rows, self._used_tokens), most_tokens=limit)
        self._sharing = None
        return first

    def writer(self, spans: Sequence[TokenSpan]) -> Store:
        device = self._like.device
        prompt_N = torch.cat([torch.full((span.end - span.start,), span.prompt) for span in spans]).to(device)
        token_N = torch.cat([torch.arange(span.start, span.end) for span in spans]).to(device)

        def store(layer: int, key_NJD: Tensor, value_NJD: Tensor) -> None:
            keys, values = self._prompts.layers[layer]
            keys[prompt_N, :, token_N] = key_NJD
            values[prompt_N, :, token_N] = value_NJD

        return store

    def prompt(self, layer: int, span: TokenSpan) -> tuple[Tensor, Tensor]:
        keys, values = self._prompts.layers[layer][:, span.prompt, :, : span.end]
        return keys, values

    def copy_row(self, row: int, tokens: int) -> list[Tensor]:
        slot = self._prompt_of_row[row]
        length = self._prompt_lengths[slot]
        pairs = zip(self._prompts.layers, self._own.layers, strict=True)
        return [torch.cat([prompts[:, slot, :, :length], own[:, row, :, :tokens]], dim=2) for prompts, own in pairs]

    def remove(self, finished: Sequence[int]) -> None:
        moves = fill_holes(len(self._prompt_of_row), finished)
        self._own.move(moves, self._used_tokens)
        moves.in_list(self._prompt_of_row)
        moves.in_list(self._limits)
        alive = set(self._prompt_of_row)
        self._remove_prompts([slot for slot in range(len(self._prompt_lengths)) if slot not in alive])
        self._sharing = None

    def _remove_prompts(self, finished: Sequence[int]) -> None:
        moves = fill_holes(len(self._prompt_lengths), finished)
        self._prompts.move(moves, max(self._prompt_lengths))
        moves.in_list(self._prompt_lengths)
        places = dict(zip(moves.sources, moves.targets, strict=True))
        self._prompt_of_row = [places.get(slot, slot) for slot in self._prompt_of_row]

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
