"""The paged cache, for kernels that read keys and values through a table of pages.

The full pages of a prompt are held once and stand in the table of each of its completions; what is left of the prompt
is written into the first own page of each. A completion's pages are taken when it joins, for its longest: the budget
counts that worst case anyway, nothing has to be taken or evicted later, and a step needs no work on the host.

Axes: `B` live completions, `H` query heads, `J` key heads, `D` width of a head, `N` tokens of a prefill row, `M` places
that they are written to, `S` tokens of a page, `Z` pages of the pool, `X` pages of the longest row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from fovea.models.decoder import Attend, DecoderShape
from fovea.rollout.embedded.cache import Demand, QueuedRequest, Store, TokenSpan
from fovea.rollout.embedded.compaction import fill_holes, grown_capacity

SCRATCH = 0
"""The page that belongs to nobody: padding of tables and of captured batches points at it."""

PagedKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]
"""(query [B, H, D], key pages [Z, S, J, D], value pages, table [B, X], used tokens [B], scale) -> [B, H, D]"""


@dataclass(slots=True, eq=False)
class PagedPrompt:
    """A live prompt."""

    num_tokens: int
    pages: list[int]
    """Its full pages."""
    rows: list[PagedRow] = field(default_factory=list)
    """Completions that run."""


@dataclass(slots=True, eq=False)
class PagedRow:
    """A live completion."""

    prompt: PagedPrompt
    pages: list[int]
    """Its own: the rest of its prompt, then its tokens."""


class PagedCache:
    """Pages of a fixed pool, which stays where it is: captured graphs hold its address."""

    def __init__(
        self, shape: DecoderShape, like: Tensor, kernel: PagedKernel, *, num_tokens: int, page_tokens: int
    ) -> None:
        self._shape, self._kernel, self.page_tokens = shape, kernel, page_tokens
        self._num_pages = 1 + num_tokens // page_tokens
        pages = (2, self._num_pages, page_tokens, shape.num_kv_heads, shape.head_dim)
        # zeros: the scratch page is read, masked, and must not hold NaN
        self.pools = [like.new_zeros(pages) for _ in range(shape.num_layers)]
        self._width = 0
        self.clear()

    def clear(self) -> None:
        self._free = list(range(self._num_pages - 1, SCRATCH, -1))
        self._prompts: list[PagedPrompt] = []
        self._rows: list[PagedRow] = []
        self._table_BX = torch.zeros(0, 0, dtype=torch.int32, device=self.pools[0].device)
        self._prompt_tokens_B = torch.zeros(0, dtype=torch.long, device=self.pools[0].device)

    def cost(self, demands: Sequence[Demand]) -> int:
        """In whole pages."""
        return self.page_tokens * sum(
            demand.prompt_tokens // self.page_tokens + demand.rows * self._own_pages(demand) for demand in demands
        )

    def add(self, requests: Sequence[QueuedRequest]) -> int:
        first = len(self._prompts)
        for request in requests:
            prompt = PagedPrompt(
                num_tokens=request.prompt.num_tokens, pages=self._take(request.prompt.num_tokens // self.page_tokens)
            )
            own_pages = self._own_pages(request.demand)
            prompt.rows = [PagedRow(prompt=prompt, pages=self._take(own_pages)) for _ in range(request.n)]
            self._prompts.append(prompt)
            self._rows.extend(prompt.rows)
        self._write_table()
        return first

    def writer(self, spans: Sequence[TokenSpan]) -> Store:
        device = self.pools[0].device
        sources, places, start = [], [], 0
        for span in spans:
            source, place = self._places(span)
            sources.append(source + start)
            places.append(place)
            start += span.end - span.start
        source_M, place_M = torch.cat(sources).to(device), torch.cat(places).to(device)

        def store(layer: int, key_NJD: Tensor, value_NJD: Tensor) -> None:
            keys, values = self.pools[layer].flatten(1, 2)
            keys[place_M] = key_NJD[source_M]
            values[place_M] = value_NJD[source_M]

        return store

    def prompt(self, layer: int, span: TokenSpan) -> tuple[Tensor, Tensor]:
        prompt = self._prompts[span.prompt]
        pages = torch.tensor([*prompt.pages, prompt.rows[0].pages[0]], device=self.pools[layer].device)
        keys, values = self.pools[layer][:, pages].flatten(1, 2)[:, : span.end].transpose(1, 2)
        return keys, values

    def copy_row(self, row: int, tokens: int) -> list[Tensor]:
        live = self._rows[row]
        pages = torch.tensor([*live.prompt.pages, *live.pages], device=self.pools[0].device)
        end = live.prompt.num_tokens + tokens
        return [pool[:, pages].flatten(1, 2)[:, :end].transpose(1, 2).clone() for pool in self.pools]

    def remove(self, finished: Sequence[int]) -> None:
        for place in finished:
            row = self._rows[place]
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

    def step(self, stored_B: Tensor, longest: int, level: bool) -> Attend:
        return self.attention(self._table_BX, self.tokens(stored_B))

    def tokens(self, stored_B: Tensor) -> Tensor:
        """Tokens of each row in the cache, its prompt's included."""
        return self._prompt_tokens_B + stored_B

    @property
    def table_BX(self) -> Tensor:
        """int32; rows are padded with the scratch page."""
        return self._table_BX

    def attention(self, table_BX: Tensor, tokens_B: Tensor) -> PagedAttention:
        """One more token for rows of this table that hold so many."""
        return PagedAttention(self.pools, table_BX, tokens_B, self._kernel, self._shape.scale)

    def _own_pages(self, demand: Demand) -> int:
        return -(-(demand.prompt_tokens % self.page_tokens + demand.limit_tokens) // self.page_tokens)

    def _take(self, count: int) -> list[int]:
        assert count <= len(self._free), f"{count} pages wanted of {len(self._free)}: the budget has admitted too much"
        return [self._free.pop() for _ in range(count)]

    def _write_table(self) -> None:
        """Anew for all rows; its width only grows, and doubles then: a captured graph is for one width."""
        lists = [[*row.prompt.pages, *row.pages] for row in self._rows]
        self._width = grown_capacity(self._width, max(len(pages) for pages in lists))
        padded = [[*pages, *[SCRATCH] * (self._width - len(pages))] for pages in lists]
        device = self._table_BX.device
        self._table_BX = torch.tensor(padded, dtype=torch.int32, device=device)
        self._prompt_tokens_B = torch.tensor([row.prompt.num_tokens for row in self._rows], device=device)

    def _places(self, span: TokenSpan) -> tuple[Tensor, Tensor]:
        """Which tokens [M] of a span go to which places [M] of the pool."""
        prompt, size = self._prompts[span.prompt], self.page_tokens
        token_N = torch.arange(span.start, span.end)
        full = len(prompt.pages) * size
        in_full_N, rest_N = token_N[token_N < full], token_N[token_N >= full]
        full_places = torch.tensor(prompt.pages, dtype=torch.long)[in_full_N // size] * size + in_full_N % size
        first_own = torch.tensor([row.pages[0] for row in prompt.rows])
        rest_places = (first_own[:, None] * size + rest_N % size).flatten()
        source = torch.cat([in_full_N, rest_N.repeat(len(first_own))]) - span.start
        return source, torch.cat([full_places, rest_places])


class PagedAttention:
    """One decoding step through a table of pages."""

    def __init__(
        self, pools: Sequence[Tensor], table_BX: Tensor, tokens_B: Tensor, kernel: PagedKernel, scale: float
    ) -> None:
        self._pools, self._table_BX, self._kernel, self._scale = pools, table_BX, kernel, scale
        size = pools[0].shape[2]
        page_B = table_BX.gather(1, (tokens_B // size)[:, None])[:, 0]
        self._place_B = page_B.long() * size + tokens_B % size
        self._used_B = (tokens_B + 1).to(torch.int32)

    def __call__(self, layer: int, query_BHD: Tensor, key_BJD: Tensor, value_BJD: Tensor) -> Tensor:
        """Stores the new keys and values; [B, H, D]."""
        keys, values = self._pools[layer]
        keys.flatten(0, 1).index_copy_(0, self._place_B, key_BJD)
        values.flatten(0, 1).index_copy_(0, self._place_B, value_BJD)
        return self._kernel(query_BHD, keys, values, self._table_BX, self._used_B, self._scale)


def gathered_attention(
    query_BHD: Tensor, keys: Tensor, values: Tensor, table_BX: Tensor, used_B: Tensor, scale: float
) -> Tensor:
    """The slow twin of `varlen_attention`, on any device: gathers every row's pages and masks what is unused."""
    heads = query_BHD.shape[1] // keys.shape[2]
    keys, values = (
        x[table_BX.long()].flatten(1, 2).transpose(1, 2).repeat_interleave(heads, 1) for x in (keys, values)
    )
    used = torch.arange(keys.shape[2], device=used_B.device) < used_B[:, None]
    out = F.scaled_dot_product_attention(
        query_BHD[:, :, None], keys, values, attn_mask=used[:, None, None], scale=scale
    )
    return out[:, :, 0]
