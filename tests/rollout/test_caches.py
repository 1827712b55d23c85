"""Both caches against attention over each completion's own whole row of keys and values.

Axes: `B` live completions, `H` query heads, `J` key heads, `D` width of a head.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fovea.config.backends import EmbeddedSettings
from fovea.config.loading import load_config
from fovea.models.decoder import DecoderShape, decoder_shape
from fovea.rollout.embedded import paged_cache
from fovea.rollout.embedded.cache import Cache, TokenSpan, fill_holes, grown_capacity
from fovea.rollout.embedded.dense_cache import FIRST_TOKENS, DenseCache, KeyValues
from fovea.rollout.embedded.paged_cache import GROWTH_TOKENS, MAX_ROWS, SCRATCH, PagedCache, gathered_attention
from fovea.rollout.embedded.requests import QueuedRequest
from fovea.rollout.embedded.tuning import PAGE_TOKENS
from fovea.types import Request, Sampling
from fovea_gym.utils.event_loop import wait_for
from tests.records import text_prompt
from tests.rollout.drawing import generate, make_engine, mixed_requests, seeded
from tests.tiny_models import tiny
from tests.tools.plan.published import RECIPES

SHAPE = DecoderShape(num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, norm_eps=1e-6)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.03}
"""Float32: sums in another order. Bfloat16: its rounding of scores and weights, at values of about 1."""


def request(prompt_tokens: int, n: int, limit: int) -> QueuedRequest:
    return QueuedRequest(
        request=Request(id="r", prompt=text_prompt([0] * prompt_tokens), sampling=Sampling(max_new_tokens=limit), n=n),
        done=asyncio.Future(loop=LOOP),
        positions_3L=np.zeros((3, prompt_tokens), dtype=np.int64),
        first_position=prompt_tokens,
    )


LOOP = asyncio.new_event_loop()


def make_cache(kind: str, dtype: torch.dtype = torch.float32, num_tokens: int = 3_000) -> Cache:
    like = torch.empty(0, dtype=dtype)
    if kind == "dense":
        return DenseCache(SHAPE, like, num_tokens=num_tokens)
    return PagedCache(SHAPE, like, gathered_attention, num_tokens=num_tokens, page_tokens=4)


class Rows:
    """A cache beside plain copies of everything that each row has been given."""

    def __init__(self, cache: Cache, dtype: torch.dtype) -> None:
        self.cache, self.dtype = cache, dtype
        self.seed = torch.Generator().manual_seed(0)
        self.keys: list[list[Tensor]] = []
        self.values: list[list[Tensor]] = []
        """Of each row, a tensor [J, tokens, D] per layer."""
        self.stored: list[int] = []

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.seed).to(self.dtype)

    def add(self, *requests: QueuedRequest) -> None:
        first = self.cache.add(requests)
        lengths = [r.prompt.num_tokens for r in requests]
        spans = [TokenSpan(prompt=first + i, start=0, end=length) for i, length in enumerate(lengths)]
        store = self.cache.writer(spans)
        given = [(self.random(sum(lengths), 2, 8), self.random(sum(lengths), 2, 8)) for _ in range(SHAPE.num_layers)]
        for layer, (key, value) in enumerate(given):
            store(layer, key, value)
        for i, (one, span) in enumerate(zip(requests, spans, strict=True)):
            own = [[x.split(lengths)[i].transpose(0, 1) for x in layer] for layer in given]
            for layer, (key, value) in enumerate(own):
                stored_key, stored_value = self.cache.reader([span])(layer)
                assert torch.equal(stored_key, key.transpose(0, 1))
                assert torch.equal(stored_value, value.transpose(0, 1))
            self.keys += [[key for key, _ in own] for _ in range(one.n)]
            self.values += [[value for _, value in own] for _ in range(one.n)]
            self.stored += [0] * one.n

    def step(self) -> None:
        stored_B = torch.tensor(self.stored)
        level = len(set(self.stored)) == 1
        assert self.cache.reserve([stored + 1 for stored in self.stored])
        attend = self.cache.step(stored_B, max(self.stored), level)
        for layer in range(SHAPE.num_layers):
            rows = len(self.stored)
            query, key, value = self.random(rows, 6, 8), self.random(rows, 2, 8), self.random(rows, 2, 8)
            out = attend(layer, query, key, value)
            for row in range(rows):
                self.note(row, layer, key, value)
                k, v = (x[row][layer].float().repeat_interleave(3, 0) for x in (self.keys, self.values))
                expected = F.scaled_dot_product_attention(query[row, :, None].float(), k, v)[:, 0]
                torch.testing.assert_close(out[row].float(), expected, atol=TOLERANCE[self.dtype], rtol=0)
        self.stored = [count + 1 for count in self.stored]

    def note(self, row: int, layer: int, key: Tensor, value: Tensor) -> None:
        for copies, new in ((self.keys, key), (self.values, value)):
            copies[row][layer] = torch.cat([copies[row][layer], new[row, :, None]], 1)

    def remove(self, *ended: int) -> None:
        self.cache.remove(ended)
        moves = fill_holes(len(self.stored), ended)
        for rows in (self.keys, self.values, self.stored):
            moves.in_list(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_attention_of_every_row_is_that_of_its_own_keys(kind: str, dtype: torch.dtype) -> None:
    rows = Rows(make_cache(kind, dtype), dtype)
    rows.add(request(5, 3, 90), request(9, 1, 90))
    for _ in range(3):
        rows.step()
    rows.remove(1)
    rows.step()
    rows.add(request(3, 2, 6), request(8, 4, 70))
    rows.step()
    rows.remove(0, 2)  # the single row of the second prompt, and one of the first's
    for _ in range(2):
        rows.step()
    rows.remove(0, 3, 4, 5)
    rows.add(request(17, 2, 80))
    for _ in range(FIRST_TOKENS):
        rows.step()  # past the first room for tokens


@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_an_ended_row_that_goes_on_harms_nobody(kind: str) -> None:
    """Inside a block of steps it writes its last place again and again."""
    rows = Rows(make_cache(kind), torch.float32)
    rows.add(request(5, 3, 6))
    for _ in range(3):
        rows.step()
    for longest in (3, 4):
        assert rows.cache.reserve([longest + 1] * 3)
        attend = rows.cache.step(torch.tensor([longest, 2, longest]), longest, level=True)
        for layer in range(SHAPE.num_layers):
            key, value = rows.random(3, 2, 8), rows.random(3, 2, 8)
            attend(layer, rows.random(3, 6, 8), key, value)
            for row in (0, 2):  # what they wrote is what the step below must find
                rows.note(row, layer, key, value)
    rows.stored = [5, 5, 5]
    rows.remove(1)
    rows.step()


def tiled_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    used: Tensor,
    shared: Tensor,
    mates: Tensor,
    scale: float,
) -> Tensor:
    """Reads the shared tokens of each row where the row that leads it finds them, as the kernel does."""
    read = table.clone()
    for row, pages in enumerate((shared // keys.shape[1]).tolist()):
        read[row, :pages] = SCRATCH
    for leader in (mates[:, :1] >= 0).any(1).nonzero().flatten().tolist():
        pages = int(shared[leader]) // keys.shape[1]
        for mate in mates[leader][mates[leader] >= 0].tolist():
            assert shared[mate] == shared[leader]
            read[mate, :pages] = table[leader, :pages]
    return gathered_attention(query, keys, values, read, used, shared, mates, scale)


def test_rows_find_the_prompt_that_they_share_as_others_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_cache, "MIN_SHARED_TOKENS", 8)
    cache = PagedCache(SHAPE, torch.empty(0), tiled_attention, num_tokens=3_000, page_tokens=4)
    rows = Rows(cache, torch.float32)

    def step(*tokens: int) -> None:
        rows.step()
        mates = cache.shared.mates_BR
        assert cache.shared.tokens_B.tolist() == list(tokens)
        assert sorted(mates[mates >= 0].tolist()) == [row for row, number in enumerate(tokens) if number]

    rows.add(request(9, 1, 90))
    step(0)
    assert cache.shared.mates_BR.shape == (1, 0), "nothing to share yet"
    # the ninth row of a prompt reads it by itself, and so do rows of a short prompt
    rows.add(request(14, 9, 90), request(7, 2, 90), request(9, 2, 90))
    step(0, *[12] * 8, 0, 0, 0, 8, 8)
    # the last rows move into the holes: one of the short prompt, and one whose mate has gone
    rows.remove(0, 2, 13)
    step(0, 12, 0, *[12] * 7, 0)


def test_requests_cost_their_worst_case_and_slots_are_admitted_by_it() -> None:
    assert make_cache("dense").cost(request(10, 2, 7)) == 10 + 2 * 7
    # pages of 4: 2 full ones, 2 rows with 2 + 7 tokens
    assert make_cache("paged").cost(request(10, 2, 7)) == 4 * (2 + 2 * 3)
    cache = make_cache("dense", num_tokens=2 * 10 + 5 * 7)
    assert cache.fits([request(10, 2, 7), request(6, 3, 5)])
    cache.add([request(10, 2, 7)])
    assert cache.fits([request(6, 3, 5)])
    assert not cache.fits([request(6, 4, 5)])


def test_states_of_rows_are_admitted_as_the_tokens_that_take_as_much_memory() -> None:
    parts = tiny("qwen3_5")
    shape, width = decoder_shape(parts.network.config.text_config), 4
    cache = DenseCache(shape, torch.empty(0), num_tokens=10_000)
    cache.add([request(10, 2, 7)])
    assert cache.states is not None
    cache.states.begin([None])
    cache.states.branch([2])
    held = sum(x.nbytes for each in cache.states.copy_row(0) for x in (each.tail_RKC, each.memory_RVDF))
    tokens = -(-held // (2 * shape.num_attention_layers * shape.num_kv_heads * shape.head_dim * width))
    assert tokens > 7
    assert cache.cost(request(10, 2, 7)) == 10 + 2 * (7 + tokens)
    tight = DenseCache(shape, torch.empty(0), num_tokens=10 + 2 * (7 + tokens))
    assert tight.fits([request(10, 2, 7)])
    assert not tight.fits([request(11, 2, 7)])


def test_pages_are_admitted_by_use_and_room_to_grow() -> None:
    # 1 full page and 2 rows with 2 tokens of the prompt and room to grow, of which 1 page each is in use
    grown = -(-(2 + GROWTH_TOKENS) // 4)
    cache = make_cache("paged", num_tokens=4 * (1 + 2 * grown + grown))
    assert isinstance(cache, PagedCache)
    assert cache.fits([request(6, 2, 1_000)])
    cache.add([request(6, 2, 1_000)])
    assert cache.fits([request(2, 1, 1_000)]), "rest of the prompt and room to grow"
    assert not cache.fits([request(3 + 4, 1, 1_000)])
    assert cache.reserve([60, 2])
    assert not cache.fits([request(2, 1, 1_000)])
    assert cache.fits([request(1, 1, 2)]), "short ones need less"


@pytest.mark.parametrize(("prompt_tokens", "rows"), [(420, 512), (4096, 224)])
def test_a_rollout_of_geo3k_on_one_gpu_runs_most_of_its_512_rows_at_once(prompt_tokens: int, rows: int) -> None:
    """With prompts of usual and of the greatest length; by their worst case 3 of its 64 prompts would fit."""
    rollout = load_config([RECIPES / "geo3k.yaml"], []).rollout
    assert isinstance(rollout.engine, EmbeddedSettings)
    assert rollout.engine.max_batch_tokens is not None
    small = DecoderShape(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1, norm_eps=1e-6)
    cache = PagedCache(
        small, torch.empty(0), gathered_attention, num_tokens=rollout.engine.max_batch_tokens, page_tokens=PAGE_TOKENS
    )
    group = request(prompt_tokens, rollout.samples_per_prompt, rollout.max_new_tokens)
    admitted = next(count for count in range(1, 65) if count == 64 or not cache.fits([group] * (count + 1)))
    assert admitted * rollout.samples_per_prompt == rows
    assert 3 * cache.cost(group) <= rollout.engine.max_batch_tokens < 4 * cache.cost(group)


def test_rows_that_decode_at_once_are_bounded() -> None:
    cache = make_cache("paged", num_tokens=200_000)
    assert cache.fits([request(5, 512, 9), request(5, MAX_ROWS - 512, 9)])
    assert not cache.fits([request(5, 512, 9), request(5, MAX_ROWS - 511, 9)])
    assert cache.fits([request(5, MAX_ROWS + 1, 9)]), "alone"
    cache.add([request(5, 1, 9)])
    assert not cache.fits([request(5, MAX_ROWS, 9)])


def test_pages_are_taken_as_rows_grow() -> None:
    cache = make_cache("paged", num_tokens=4 * 9)
    assert isinstance(cache, PagedCache)
    cache.add([request(10, 3, 20)])
    table = cache.table_BX
    assert table.shape == (3, 8), "for the longest conversation, in a power of two"
    assert (table[:, :2] == table[0, :2]).all(), "completions share the full pages of their prompt"
    assert (table != 0).sum(1).tolist() == [3, 3, 3]
    assert cache.reserve([2, 3, 7])
    assert (table != 0).sum(1).tolist() == [3, 4, 5]
    assert len(table[table != 0].unique()) == 2 + 1 + 2 + 3
    assert not cache.reserve([6, 7, 7]), "one page is left"
    assert (table != 0).sum(1).tolist() == [3, 4, 5], "all or nothing"
    cache.remove([2])
    assert cache.reserve([6, 7])


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    """Rows and room of all buffers, prompts' and completions', after each time that one of them may have grown."""
    buffers, sizes, reserve = list[KeyValues](), list[list[tuple[int, int]]](), KeyValues.reserve

    def noted(self: KeyValues, *arguments: Any, **more: Any) -> None:
        reserve(self, *arguments, **more)
        if self not in buffers:
            buffers.append(self)
        sizes.append([(each.rows, each.room) for each in buffers])

    monkeypatch.setattr(KeyValues, "reserve", noted)
    return sizes


def test_room_for_tokens_grows_by_doubling(sizes: list[list[tuple[int, int]]]) -> None:
    cache = make_cache("dense")
    cache.add([request(4, 2, 300)])
    for stored in range(300):
        cache.step(torch.tensor([stored, stored]), stored, level=True)
    assert sorted({each[1][1] for each in sizes if len(each) == 2}) == [64, 128, 256, 300]


def test_pages_are_all_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the engine clears its cache, which is empty then."""
    parts = tiny("qwen3_vl")
    engine = make_engine(parts, 2_000, cache="paged", page_tokens=16)
    prompts, samplings = mixed_requests(parts)
    generate(engine, prompts, samplings, 4)
    free, clear = list[int](), PagedCache.clear

    def room(cache: PagedCache) -> int:
        """Tokens of the longest prompt that fits."""
        return max(tokens for tokens in range(2_000) if cache.fits([request(tokens, 1, 1)]))

    def noted(cache: PagedCache) -> None:
        free.append(room(cache))
        clear(cache)
        free.append(room(cache))

    monkeypatch.setattr(PagedCache, "clear", noted)
    generate(engine, prompts, samplings, 4)
    used, cleared = free
    assert used == cleared > 1_900
    wait_for(engine.sleep())
    assert not engine.free_memory(), "there is no cache any more"


def test_many_short_prompts_and_then_a_few_long_ones_do_not_add_up_to_many_long_ones(
    sizes: list[list[tuple[int, int]]],
) -> None:
    parts = tiny("qwen2_vl")
    prompts = [text_prompt(np.arange(tokens) % 200) for tokens in [20] * 220 + [700] * 10]
    generate(make_engine(parts, 8000), prompts, seeded(230, max_new_tokens=16), n=1)
    assert max(sum(rows * room for rows, room in each) for each in sizes) < 2 * 8000


def test_the_last_live_rows_fill_the_holes_and_room_doubles() -> None:
    moves, rows = fill_holes(6, [1, 4]), list("abcdef")
    moves.in_list(rows)
    assert (moves.sources, moves.targets, moves.count, rows) == ((5,), (1,), 4, list("afcd"))
    assert [grown_capacity(0, 3), grown_capacity(3, 3), grown_capacity(3, 4), grown_capacity(3, 50)] == [3, 3, 6, 50]


@given(st.integers(1, 40).flatmap(lambda count: st.tuples(st.just(count), st.sets(st.integers(0, count - 1)))))
def test_whatever_ends_the_rest_stays(case: tuple[int, set[int]]) -> None:
    count, ended = case
    moves, rows = fill_holes(count, sorted(ended)), list(range(count))
    moves.in_list(rows)
    assert sorted(rows) == sorted(set(range(count)) - ended)
    assert len(moves.sources) <= len(ended)
