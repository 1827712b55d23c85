"""The paged KV cache, for kernels that read keys and values through a page table.

The full pages of a prompt are stored once and referenced by the page table of each of its completions; the rest of the
prompt is copied into the first page of each completion. A completion allocates pages as it grows (decision 051). A
kernel may read the full pages once for several completions: `SharedPrompts` says for which.

Axes: `B` rows of the decode batch, `H` query heads, `J` key heads, `D` width of a head, `N` tokens of a prefill pass,
`M` slots that a pass reads or writes, `S` tokens of a page, `Z` pages of the pool, `X` pages of the longest row, `R`
rows that share a prompt. A slot is the index of a token in the flattened pool: page x S + offset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from fovea.models.decoder import Attend, DecoderShape
from fovea.models.transfer import to_device
from fovea.rollout.embedded.cache import Load, Store, TokenSpan, fill_holes
from fovea.rollout.embedded.requests import QueuedRequest
from fovea.utils.tensor_records import map_tensors

SCRATCH = 0
"""Index of the scratch page, which the padding of page tables and captured batches reads and writes."""
GROWTH_TOKENS = 64
"""Tokens by which every row must have room to grow when a request is admitted. Without them, rows that have just been
prefilled would be preempted at the next wait, and prefilled again."""
MAX_ROWS = 1024
"""Maximum number of rows that decode at once: with more, a step is bound by matrix products, and sampling needs about
2 MB of memory per row."""

TILE_ROWS = 8
"""Maximum number of rows for which a kernel reads a prompt at once. Each key head of Qwen3-VL-2B has two query heads,
and of 8B four, so eight rows fill a tensor core product of 16 or 32 queries."""
MIN_SHARED_TOKENS = 64
"""Length of the shortest prompt that is read for several rows at once; for fewer tokens merging the two parts of the
attention costs more than reading them again."""

PagedKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]
"""Paged attention [B, H, D] of (query [B, H, D], key and value pages [Z, S, J, D], table [B, X], tokens [B],
`SharedPrompts.tokens_B`, `SharedPrompts.mates_BR`, scale)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrompts:
    """The rows for which a kernel may read the full pages of a prompt at once, in tensors of int32."""

    tokens_B: Tensor
    """Number of tokens at the start of each row that are read for its mates as well; 0 for a row without mates."""
    mates_BR: Tensor
    """The rows for which row b reads these tokens, itself first, padded with -1; -1 throughout where another row reads
    them, or none. R is 0 if the batch has had no prompt with several rows."""


def shared_prompts(prompts: Iterable[tuple[int, Sequence[int]]], num_rows: int, width: int) -> SharedPrompts:
    """Tile the rows of each prompt; a prompt has a number of tokens in full pages, and the indices of its rows.

    `width` is R, at least 2, or 0 to share nothing.
    """
    tokens_B = torch.zeros(num_rows, dtype=torch.int32)
    mates_BR = torch.full((num_rows, width), -1, dtype=torch.int32)
    for tokens, rows in prompts if width else ():
        if tokens >= MIN_SHARED_TOKENS:
            for mates in (rows[start : start + width] for start in range(0, len(rows), width)):
                if len(mates) > 1:
                    tokens_B[mates] = tokens
                    mates_BR[mates[0], : len(mates)] = torch.tensor(mates, dtype=torch.int32)
    return SharedPrompts(tokens_B=tokens_B, mates_BR=mates_BR)


@dataclass(slots=True, eq=False)
class PagedPrompt:
    """The pages of one prompt."""

    pages: list[int]
    """Pages that the prompt fills completely."""
    rows: list[PagedRow] = field(default_factory=list)
    """Running completions of the prompt."""


@dataclass(slots=True, eq=False)
class PagedRow:
    """The pages of one running completion."""

    prompt: PagedPrompt
    prompt_tokens: int
    """Number of tokens before the first sampled one; the prompt of a resumed completion also holds sampled tokens."""
    tokens: int
    """Number of sampled tokens for which pages have been reserved."""
    limit_tokens: int
    pages: list[int] = field(default_factory=list)
    """Pages of this row only: first the rest of its prompt, then its sampled tokens."""


class PagedCache:
    """KV cache in pages of a preallocated pool."""

    states = None
    """Always None: a decoder with delta nets uses the dense cache."""

    def __init__(
        self, shape: DecoderShape, like: Tensor, kernel: PagedKernel, *, num_tokens: int, page_tokens: int
    ) -> None:
        self._shape, self._kernel, self.page_tokens = shape, kernel, page_tokens
        self._num_pages = 1 + num_tokens // page_tokens
        pages = (2, self._num_pages, page_tokens, shape.num_kv_heads, shape.head_dim)
        # one pool that never moves, since CUDA graphs hold its address; zeros, since the scratch page is read under a
        # mask and must not hold NaN: 0 * NaN is NaN
        self.pools = [like.new_zeros(pages) for _ in range(shape.num_layers)]
        self._width = self._tile = 0
        self.clear()

    def clear(self) -> None:
        self._free = list(range(self._num_pages - 1, SCRATCH, -1))
        self._prompts: list[PagedPrompt] = []
        self._rows: list[PagedRow] = []
        self._table_BX = torch.zeros(0, self._width, dtype=torch.int32, device=self.pools[0].device)
        self._prompt_tokens_B = torch.zeros(0, dtype=torch.long, device=self.pools[0].device)
        self._shared: SharedPrompts | None = None

    def cost(self, request: QueuedRequest) -> int:
        # in whole pages; the last, partly filled page of a prompt counts for each completion
        return self.page_tokens * self._new_pages(request, request.limit_tokens)

    def fits(self, requests: Sequence[QueuedRequest]) -> bool:
        rows = len(self._rows) + sum(request.n for request in requests)
        # a request with more rows than MAX_ROWS runs by itself
        if rows > max(MAX_ROWS, requests[0].n):
            return False
        growth = sum(self._missing(row, row.tokens + GROWTH_TOKENS) for row in self._rows)
        return growth + sum(self._new_pages(each, each.sampled_tokens + GROWTH_TOKENS) for each in requests) <= len(
            self._free
        )

    def add(self, requests: Sequence[QueuedRequest]) -> int:
        first, rows = len(self._prompts), []
        for request in requests:
            prompt = PagedPrompt(pages=self._take(request.prompt.num_tokens // self.page_tokens))
            prompt.rows = [self._new_row(prompt, request) for _ in range(request.n)]
            self._prompts.append(prompt)
            rows += prompt.rows
        # each width of the page table needs its own CUDA graphs, so the width only grows, and at least doubles
        pages = -(-max(row.prompt_tokens + row.limit_tokens for row in rows) // self.page_tokens)
        if pages > self._width:
            added = (1 << (pages - 1).bit_length()) - self._width
            self._width += added
            self._table_BX = F.pad(self._table_BX, (0, added), value=SCRATCH)
        self._rows += rows
        self._append_to_table(rows)
        # each width of the table of mates needs its own CUDA graphs, so it only grows
        self._tile = TILE_ROWS if any(request.n > 1 for request in requests) else self._tile
        self._shared = None
        return first

    def reserve(self, tokens_B: Sequence[int]) -> bool:
        # counted before any page is allocated, so that a refusal changes nothing
        missing = [self._missing(row, tokens) for row, tokens in zip(self._rows, tokens_B, strict=True)]
        if sum(missing) > len(self._free):
            return False
        entries = []
        for index, (row, tokens, count) in enumerate(zip(self._rows, tokens_B, missing, strict=True)):
            column = len(row.prompt.pages) + len(row.pages)
            new = self._take(count)
            entries += [(index, column + place, page) for place, page in enumerate(new)]
            row.pages += new
            row.tokens = tokens
        if entries:
            row_M, column_M, page_M = to_device(torch.tensor(entries, dtype=torch.int32).t(), self._table_BX.device)
            self._table_BX[row_M, column_M] = page_M
        return True

    def writer(self, spans: Sequence[TokenSpan]) -> Store:
        device = self.pools[0].device
        sources, slots, start = [], [], 0
        for span in spans:
            source, slot = self._slots(span)
            sources.append(source + start)
            slots.append(slot)
            start += span.end - span.start
        source_M, slot_M = to_device(torch.cat(sources), device), to_device(torch.cat(slots), device)

        def store(layer: int, key_NJD: Tensor, value_NJD: Tensor) -> None:
            keys, values = self.pools[layer].flatten(1, 2)
            keys[slot_M] = key_NJD[source_M]
            values[slot_M] = value_NJD[source_M]

        return store

    def reader(self, spans: Sequence[TokenSpan]) -> Load:
        offset_S, slots = torch.arange(self.page_tokens), []
        for span in spans:
            prompt = self._prompts[span.prompt]
            # the rest of the prompt is in the first page of every row, so any row will do
            pages = torch.tensor([*prompt.pages, prompt.rows[0].pages[0]])
            slots.append((pages[:, None] * self.page_tokens + offset_S).flatten()[: span.end])
        slot_M = to_device(torch.cat(slots), self.pools[0].device)

        def load(layer: int) -> tuple[Tensor, Tensor]:
            keys, values = self.pools[layer].flatten(1, 2).index_select(1, slot_M)
            return keys, values

        return load

    def copy_row(self, row: int, tokens: int) -> list[Tensor]:
        live = self._rows[row]
        pages = to_device(torch.tensor([*live.prompt.pages, *live.pages]), self.pools[0].device)
        end = live.prompt_tokens + tokens
        return [pool[:, pages].flatten(1, 2)[:, :end].transpose(1, 2).clone() for pool in self.pools]

    def remove(self, finished: Sequence[int]) -> None:
        for index in finished:
            row = self._rows[index]
            self._free.extend(row.pages)
            row.prompt.rows.remove(row)
            if not row.prompt.rows:
                self._free.extend(row.prompt.pages)
                self._prompts.remove(row.prompt)
        moves = fill_holes(len(self._rows), finished)
        moves.in_list(self._rows)
        sources, targets = moves.index(self._table_BX.device)
        for rows in (self._table_BX, self._prompt_tokens_B):
            rows[targets] = rows[sources]
        self._table_BX, self._prompt_tokens_B = self._table_BX[: moves.count], self._prompt_tokens_B[: moves.count]
        self._shared = None

    def step(self, stored_B: Tensor, longest: int, level: bool) -> Attend:
        return self.attention(self._table_BX, self.tokens(stored_B), self.shared)

    def tokens(self, stored_B: Tensor) -> Tensor:
        """Number of tokens [B] of each row in the cache, prompt included."""
        return self._prompt_tokens_B + stored_B

    @property
    def table_BX(self) -> Tensor:
        """Page table of all rows in int32, padded with the scratch page."""
        return self._table_BX

    @property
    def shared(self) -> SharedPrompts:
        """The rows that share full pages of a prompt, computed again when rows have come or gone."""
        if self._shared is None:
            rows_of: dict[int, list[int]] = {}
            for index, row in enumerate(self._rows):
                rows_of.setdefault(id(row.prompt), []).append(index)
            prompts = [(len(self._rows[rows[0]].prompt.pages) * self.page_tokens, rows) for rows in rows_of.values()]
            on_host = shared_prompts(prompts, len(self._rows), self._tile)
            self._shared = map_tensors(lambda x: to_device(x, self.pools[0].device), on_host)
        return self._shared

    def attention(self, table_BX: Tensor, tokens_B: Tensor, shared: SharedPrompts) -> PagedAttention:
        """Return the attention of a decode step for rows with this page table and `tokens_B` tokens in the cache."""
        return PagedAttention(self.pools, table_BX, tokens_B, shared, self._kernel, self._shape.scale)

    def _new_pages(self, request: QueuedRequest, tokens: int) -> int:
        """Number of pages of a request whose completions have `tokens` tokens, capped at their limit."""
        full, rest = divmod(request.prompt.num_tokens, self.page_tokens)
        own = min(tokens, request.limit_tokens) - request.sampled_tokens
        return full + request.n * -(-(rest + own) // self.page_tokens)

    def _missing(self, row: PagedRow, tokens: int) -> int:
        """Number of pages that a row lacks for `tokens` sampled tokens, capped at its limit."""
        needed = -(-(row.prompt_tokens + min(tokens, row.limit_tokens)) // self.page_tokens)
        return max(0, needed - len(row.prompt.pages) - len(row.pages))

    def _new_row(self, prompt: PagedPrompt, request: QueuedRequest) -> PagedRow:
        sampled = request.sampled_tokens
        row = PagedRow(
            prompt=prompt,
            prompt_tokens=request.prompt.num_tokens - sampled,
            tokens=sampled + 1,
            limit_tokens=request.limit_tokens,
        )
        row.pages = self._take(self._missing(row, row.tokens))
        return row

    def _take(self, count: int) -> list[int]:
        assert count <= len(self._free), f"{count} pages are needed and {len(self._free)} are free"
        # reuse the pages that were freed last
        return [self._free.pop() for _ in range(count)]

    def _append_to_table(self, rows: Sequence[PagedRow]) -> None:
        table_BX = torch.full((len(rows), self._width), SCRATCH, dtype=torch.int32)
        for line_X, row in zip(table_BX, rows, strict=True):
            pages = [*row.prompt.pages, *row.pages]
            line_X[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
        tokens_B = torch.tensor([row.prompt_tokens for row in rows])
        device = self._table_BX.device
        self._table_BX = torch.cat([self._table_BX, to_device(table_BX, device)])
        self._prompt_tokens_B = torch.cat([self._prompt_tokens_B, to_device(tokens_B, device)])

    def _slots(self, span: TokenSpan) -> tuple[Tensor, Tensor]:
        """Offsets [M] of tokens in a span, and the slots [M] in the pool to which these tokens are written."""
        prompt, size = self._prompts[span.prompt], self.page_tokens
        token_N = torch.arange(span.start, span.end)
        full = len(prompt.pages) * size
        in_full_N, rest_N = token_N[token_N < full], token_N[token_N >= full]
        # page x size + offset for each token
        full_slots = torch.tensor(prompt.pages, dtype=torch.long)[in_full_N // size] * size + in_full_N % size
        # once for every completion, since each has its own copy of the rest
        first_own = torch.tensor([row.pages[0] for row in prompt.rows])
        rest_slots = (first_own[:, None] * size + rest_N % size).flatten()
        source = torch.cat([in_full_N, rest_N.repeat(len(first_own))]) - span.start
        return source, torch.cat([full_slots, rest_slots])


class PagedAttention:
    """Attention of one decode step through a page table."""

    def __init__(
        self,
        pools: Sequence[Tensor],
        table_BX: Tensor,
        tokens_B: Tensor,
        shared: SharedPrompts,
        kernel: PagedKernel,
        scale: float,
    ) -> None:
        self._pools, self._table_BX, self._shared, self._kernel, self._scale = pools, table_BX, shared, kernel, scale
        # computed once per step, used by all layers
        size = pools[0].shape[2]
        # `tokens_B` is the index of the new token, which gives its page and the offset in that page
        page_B = table_BX.gather(1, (tokens_B // size)[:, None])[:, 0]
        self._slot_B = page_B.long() * size + tokens_B % size
        self._used_B = (tokens_B + 1).to(torch.int32)

    def __call__(self, layer: int, query_BHD: Tensor, key_BJD: Tensor, value_BJD: Tensor) -> Tensor:
        """Store the new keys and values, and compute attention; returns [B, H, D]."""
        keys, values = self._pools[layer]
        keys.flatten(0, 1).index_copy_(0, self._slot_B, key_BJD)
        values.flatten(0, 1).index_copy_(0, self._slot_B, value_BJD)
        shared = self._shared.tokens_B, self._shared.mates_BR
        return self._kernel(query_BHD, keys, values, self._table_BX, self._used_B, *shared, self._scale)


def gathered_attention(
    query_BHD: Tensor,
    keys: Tensor,
    values: Tensor,
    table_BX: Tensor,
    used_B: Tensor,
    _shared_B: Tensor,
    _mates_BR: Tensor,
    scale: float,
) -> Tensor:
    """Paged attention on any device, a slow reference for `paged_attention`: gathers all pages, masks unused slots."""
    heads = query_BHD.shape[1] // keys.shape[2]
    keys, values = (
        x[table_BX.long()].flatten(1, 2).transpose(1, 2).repeat_interleave(heads, 1) for x in (keys, values)
    )
    used = torch.arange(keys.shape[2], device=used_B.device) < used_B[:, None]
    out = F.scaled_dot_product_attention(
        query_BHD[:, :, None], keys, values, attn_mask=used[:, None, None], scale=scale
    )
    return out[:, :, 0]
