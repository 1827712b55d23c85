"""Decoding on a GPU: paged attention and its trial, graphs of steps, and how often the host waits for the device.

A rerun stands for the capture of a graph, and torch's meta device (`tests.meta_device`) for the GPU. Triton comes with
CUDA builds of torch, and to CPUs with SGLang: the tests that need it are part of SGLang's suite.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fovea.models.varlen import HeadShape
from fovea.models.vlm import VLM
from fovea.rollout.embedded.decode_step import (
    CudaCapture,
    DecodeGraphs,
    GraphInputs,
    GraphStepper,
    SampledTokens,
    captured_rows,
    rerun,
)
from fovea.rollout.embedded.engine import EmbeddedEngine
from fovea.rollout.embedded.paged_attention import TOLERANCE, difference
from fovea.rollout.embedded.paged_cache import PagedCache, gathered_attention, shared_prompts
from fovea.rollout.embedded.sampler import Draw, SamplingNeeds, needs_of, row_settings, sample_tokens
from fovea.rollout.embedded.tuning import Tuning, decoding_note
from fovea.types import Completion, Request, Sampling
from fovea.utils.tensor_records import map_tensors
from gym_tests.tables import table
from tests.meta_device import META, PretendedDevice
from tests.rollout.drawing import noted, together
from tests.tiny_models import CPU, mixed_prompts, tiny

SHAPE = HeadShape(CPU, torch.float32, 4, 2, 16)


def wrong_from_two_rows(query: Tensor, *more: Tensor | float) -> Tensor:
    """As torch 2.13's kernel, whose output goes into a copy."""
    out = gathered_attention(query, *more)  # type: ignore[arg-type]
    return out if len(query) == 1 else torch.zeros_like(out)


def wrong_beyond(limit: int) -> object:
    def kernel(query: Tensor, keys: Tensor, values: Tensor, table: Tensor, used: Tensor, *more: Tensor) -> Tensor:
        return gathered_attention(query, keys, values, table, used.clamp(max=limit), *more)  # type: ignore[arg-type]

    return kernel


def without_shared_pages(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, used: Tensor, shared: Tensor, *more: Tensor
) -> Tensor:
    """As a kernel whose second pass is lost."""
    pages = shared[:, None] // keys.shape[1]
    others = (torch.arange(table.shape[1]) + pages).clamp(max=table.shape[1] - 1)
    return gathered_attention(query, keys, values, table.gather(1, others), used - shared, shared, *more)  # type: ignore[arg-type]


def unwritten_rows(query: Tensor, *more: Tensor | float) -> Tensor:
    out = gathered_attention(query, *more)  # type: ignore[arg-type]
    out[290:] = torch.nan
    return out


def test_the_plain_twin_passes_its_trial() -> None:
    for dtype in TOLERANCE:
        assert difference(gathered_attention, HeadShape(CPU, dtype, 4, 2, 16), 16) is None


@table(
    ("kernel", "rows", "keys"),
    [
        (wrong_from_two_rows, 2, 40),
        (wrong_beyond(128), 3, 130),
        (wrong_beyond(256), 40, 300),
        (without_shared_pages, 3, 130),
        (unwritten_rows, 300, 600),
    ],
)
def test_a_wrong_kernel_is_refused_with_where_it_is_wrong(kernel: object, rows: int, keys: int) -> None:
    found = difference(kernel, SHAPE, 16)  # type: ignore[arg-type]
    assert found is not None
    assert found.startswith(f"for {rows} rows of up to {keys} keys, its outputs have a relative error of ")


def test_a_run_on_a_gpu_prints_how_it_decodes() -> None:
    text = tiny("qwen3_vl").network.config.text_config
    fast = decoding_note(text, META, torch.float32)
    assert fast.startswith("decoding: paged attention by a Triton kernel (tried on 300 ")
    for size in (24, 80):
        text.head_dim = size
        note = decoding_note(text, META, torch.bfloat16)
        assert note.startswith("slow: decoding: ")
        assert f"its head size must be a power of two and at least 16, not {size}" in note
        assert "three to six times slower" in note


INTERPRET = """
import json
import torch
from fovea.rollout.embedded.paged_attention import paged_attention
from fovea.rollout.embedded.paged_cache import gathered_attention, shared_prompts
from fovea.rollout.embedded.paged_triton import triton_attention

CASES = [  # rows, heads, key heads, head size, tokens of a page, pages of a row, splits, rows of a prompt, tile
    (1, 4, 4, 64, 16, 3, (1, 1), 1, 0),
    (3, 16, 8, 128, 16, 20, (4, 4), 1, 0),
    (2, 28, 4, 128, 256, 2, (2, 2), 1, 0),
    (5, 16, 2, 32, 32, 11, (8, 2), 1, 8),
    (7, 6, 2, 16, 24, 5, (16, 16), 1, 0),
    (8, 4, 2, 64, 32, 7, (1, 4), 8, 8),
    (11, 28, 4, 32, 16, 12, (2, 1), 4, 8),
    (20, 2, 2, 16, 24, 9, (1, 2), 9, 8),
    (300, 1, 1, 16, 64, 3, (1, 1), 3, 8),
]

def error(dtype, rows, heads, key_heads, width, page, pages, splits, num_mates, tile):
    random = torch.Generator().manual_seed(rows)
    keys, values = torch.randn(2, 1 + rows * pages, page, key_heads, width, generator=random).to(dtype)
    query = torch.randn(rows, heads, width, generator=random).to(dtype)
    table = (1 + torch.randperm(rows * pages, generator=random)).view(rows, pages).int()
    used = torch.randint(1, 1 + page * pages, (rows,), generator=random).int()
    used[0] = 1
    # the rows of a prompt are spread over the batch
    prompt_pages, order = max(1, pages - 2), torch.randperm(rows, generator=random).tolist()
    prompts = [order[start : start + num_mates] for start in range(0, rows, num_mates)] if tile else []
    for mates in prompts if num_mates > 1 else []:
        used[mates] = used[mates] % (page * (pages - prompt_pages)) + 1 + page * prompt_pages
        table[mates, :prompt_pages] = table[mates[:1], :prompt_pages]
    shared = shared_prompts([(page * prompt_pages, mates) for mates in prompts], rows, tile)
    alone = shared.tokens_B == 0
    assert bool(alone.all()) == (num_mates == 1), "several rows share their prompt"
    tensors = query.float(), keys.float(), values.float(), table, used, shared.tokens_B, shared.mates_BR
    expected = gathered_attention(*tensors, width**-0.5)
    # the prompt's pages in the table of a row that another reads for hold NaN: nothing may read them a second time
    keys[0], values[0] = torch.nan, torch.nan
    follows = ~alone & (shared.mates_BR[:, :1] < 0).any(1) if tile else ~alone
    table[follows, :prompt_pages] = 0
    given = query, keys, values, table, used, shared.tokens_B, shared.mates_BR, width**-0.5
    found = triton_attention(*given, splits=splits)
    assert found.dtype == dtype
    assert splits != (1, 1) or torch.equal(found, paged_attention(*given))
    return float((found.float() - expected).norm() / expected.norm())

kinds = ("float32", "float16")  # the interpreter has no products of bfloat16
errors = [(kind, case, error(getattr(torch, kind), *case)) for kind in kinds for case in CASES]
print(json.dumps(errors))
"""
EXACT = {"float32": 1e-6, "float16": 1e-3}


@pytest.mark.sglang
def test_the_kernel_equals_its_plain_twin() -> None:
    """At ragged lengths, from one key on; a split may have none. A prompt is read once for up to eight of its rows."""
    found = json.loads(run_triton(INTERPRET, TRITON_INTERPRET="1"))
    assert len(found) == 18
    assert [(kind, case, error) for kind, case, error in found if not error < EXACT[kind]] == []


def run_triton(program: str, **variables: str) -> str:
    """What a program prints in a separate process: Triton reads its variables when it is imported."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


COMPILE = """
import sys
from itertools import product
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fovea.rollout.embedded.paged_triton import attend_to_split, constants

for architecture, kind, tile in product((80, 90), ("bf16", "fp32"), (0, 8)):
    for heads, key_heads, width in ((16, 8, 128), (28, 4, 64)):
        types = {name: f"*{kind}" for name in ("query", "keys", "values")}
        types |= dict.fromkeys(("table", "used", "shared", "mates"), "*i32")
        types |= {"parts": "*fp32", "logs": "*fp32", "scale": "fp32"}
        strides = ("query_row", "query_head", "page_stride", "token_stride", "head_stride", "table_row")
        types |= dict.fromkeys(strides, "i32")
        fixed = constants(heads, key_heads, width, 32, tile, (4, 2))
        places = {(len(types) + number,): value for number, value in enumerate(fixed.values())}
        source = ASTSource(attend_to_split, {**types, **dict.fromkeys(fixed, "constexpr")}, constexprs=places)
        made = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
        print(architecture, kind, heads, made.metadata.shared, made.asm["ptx"].count("mma"), len(made.asm["cubin"]))
"""
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""Shared memory of a block: CUDA C++ Programming Guide, table of compute capabilities."""


@pytest.mark.sglang
def test_it_compiles_for_nvidias_cards() -> None:
    """Without a card: Triton brings its assembler along."""
    rows = [line.split() for line in run_triton(COMPILE).splitlines()]
    assert len(rows) == 16
    for architecture, kind, _, shared, tensor_core, size in rows:
        assert int(shared) <= SHARED_BYTES[int(architecture)]
        assert int(size) > 0
        assert int(tensor_core) > 0 or kind == "fp32", "16-bit products go to the tensor cores"


SAMPLED, GREEDY = Sampling(max_new_tokens=4, temperature=0.7), Sampling(max_new_tokens=4, temperature=0)
TRUNCATED = Sampling(max_new_tokens=4, top_k=20, top_p=0.9, min_p=0.01)
NEEDS = needs_of([SAMPLED])


def inputs(rows: int, width: int = 3, sampling: Sampling = SAMPLED, tile: int = 0) -> GraphInputs:
    count = torch.arange(1, rows + 1)
    return GraphInputs(
        token_B=count,
        position_B=count + 1,
        tokens_B=count + 2,
        table_BX=(count[:, None] * 10 + torch.arange(width)).to(torch.int32),
        shared=shared_prompts([(64, range(rows))], rows, tile),
        uniform_B=torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(rows)),
        settings=row_settings([sampling] * rows, CPU),
    )


def test_a_few_graphs_run_any_number_of_rows() -> None:
    rows = (1, 2, 8, 9, 33, 64, 100, 129, 256, 257, 384, 385, 512, 513, 769)
    assert [captured_rows(each) for each in rows] == [8, 8, 8, 16, 64, 64, 128, 256, 256, 384, 384, 512, 512, 768, 1024]
    assert len({captured_rows(each) for each in range(1, 513)}) == 8
    assert all(captured_rows(captured_rows(each)) == captured_rows(each) >= each for each in range(1, 600))


def test_padding_costs_little() -> None:
    """512 rows that finish one after the other, by 2.6 ms for a step and 9 us for each of its rows."""
    lengths = np.clip(np.random.default_rng(0).lognormal(5.8, 0.6, 512), 8, 4096)
    rows = [int((lengths > step).sum()) for step in range(0, int(lengths.max()), 8)]
    padded, exact = (sum(2.6 + 0.009 * count for count in counts) for counts in (map(captured_rows, rows), rows))
    assert padded < 1.06 * exact


def test_all_sizes_are_captured_at_the_first_step_largest_first() -> None:
    captured: list[int] = []

    def capture(function: Callable[[], SampledTokens]) -> Callable[[], SampledTokens]:
        captured.append(len(function()[0]))
        return function

    graphs, at_first = DecodeGraphs(lambda x, _: (x.token_B * 2, -x.uniform_B), capture), [64, 32, 16, 8]
    for rows in (40, 5, 17, 64, 1, 33):
        given = inputs(rows)
        token_B, logprob_B = graphs(NEEDS, given)
        assert token_B.tolist() == [2 * (row + 1) for row in range(rows)]
        assert torch.equal(logprob_B, -given.uniform_B)
    assert captured == at_first
    graphs(NEEDS, inputs(70))
    graphs(needs_of([GREEDY]), inputs(4, sampling=GREEDY))
    assert captured == [*at_first, 128, 8], "more rows, or other operations, are another graph"
    graphs(NEEDS, inputs(9, width=6))
    graphs(NEEDS, inputs(3, width=6))
    assert captured == [*at_first, 128, 8, 16, 8], "a wider table is another graph"
    graphs(NEEDS, inputs(7, width=6, tile=8))
    assert captured == [*at_first, 128, 8, 16, 8, 8], "shared prompts are another pass"


def test_rows_behind_the_live_ones_point_at_the_scratch_page() -> None:
    seen: list[GraphInputs] = []

    def run(x: GraphInputs, _: SamplingNeeds) -> SampledTokens:
        seen.append(x)
        return x.token_B, x.uniform_B

    graphs = DecodeGraphs(run, rerun)
    graphs(NEEDS, inputs(8, tile=8))
    graphs(NEEDS, inputs(5, tile=8))
    assert seen[0] is seen[1], "the graph reads the same memory each time"
    assert seen[1].table_BX[5:].eq(0).all()
    assert seen[1].tokens_B.tolist() == [3, 4, 5, 6, 7, 0, 0, 0]
    assert seen[1].shared.tokens_B.tolist() == [64] * 5 + [0] * 3
    assert seen[1].shared.mates_BR.tolist() == [[0, 1, 2, 3, 4, -1, -1, -1]] + [[-1] * 8] * 7
    assert torch.equal(seen[1].table_BX[:5], inputs(5).table_BX)
    assert torch.equal(seen[1].settings.temperature_B1[:5], inputs(5).settings.temperature_B1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY, TRUNCATED])
def test_graphs_of_one_pool_replay_in_any_order(sampling: Sampling) -> None:
    weight = torch.randn(64, 6_400, device="cuda")
    needs, banned_K = needs_of([sampling]), torch.tensor([3, 5], device="cuda")

    def run(x: GraphInputs, needs: SamplingNeeds) -> SampledTokens:
        logits_BW = (x.token_B[:, None].float() * weight[:1, :64]).sin() @ weight
        return sample_tokens(
            logits_BW, Draw(uniform_B=x.uniform_B, settings=x.settings, needs=needs, banned_K=banned_K)
        )

    graphs = DecodeGraphs(run, CudaCapture())
    for rows in (40, 5, 17, 40, 16, 5, 33):
        on_gpu = map_tensors(Tensor.cuda, inputs(rows, sampling=sampling))
        torch.testing.assert_close(graphs(needs, on_gpu), run(on_gpu, needs))


ROWS = 8
"""Completions of each of the three prompts."""
TRAINING, EVALUATION = Sampling(max_new_tokens=256), Sampling(max_new_tokens=256, temperature=0)
ALL_NEEDS = Sampling(max_new_tokens=256, temperature=0.7, top_k=20, top_p=0.9, min_p=0.05)


def engine_on_meta(family: str = "qwen3_vl") -> EmbeddedEngine:
    """An engine whose rows take a page every few steps."""
    parts = tiny(family)
    vlm = VLM(parts.network.bfloat16(), parts.processor.banned_ids).to(META).eval()
    tuning = Tuning(decode_steps_per_wait=8, page_tokens=4)
    engine = EmbeddedEngine(vlm, parts.processor, max_batch_tokens=100_000, tuning=tuning)
    engine.load_weights(dict(engine.own_weights()), 0)
    return engine


def requests(*samplings: Sampling, family: str = "qwen3_vl", **more: Any) -> list[Request]:
    """A request per prompt; a single sampling is that of all of them."""
    each = zip(mixed_prompts(tiny(family)), samplings * (3 // len(samplings)), strict=True)
    return [Request(id=str(i), prompt=p, sampling=replace(s, seed=i), n=ROWS, **more) for i, (p, s) in enumerate(each)]


def rollout(
    engine: EmbeddedEngine, asked: Sequence[Request], syncs: int
) -> tuple[list[Sequence[Completion]], Counter[str]]:
    """Completions of all requests, which end at once at this sync, and the waits by the line that waits."""
    with PretendedDevice(chain(repeat(True, syncs - 1), repeat(False))) as device:
        return together(engine, asked), device.waits


@pytest.mark.parametrize(
    ("family", "samplings"),
    [
        ("qwen3_vl", [TRAINING]),
        ("qwen3_vl", [EVALUATION]),
        ("qwen3_vl", [ALL_NEEDS]),
        ("qwen2_5_vl", [TRAINING, ALL_NEEDS, EVALUATION]),
        ("qwen3_5", [TRAINING]),
    ],
    ids=["training", "evaluation", "all needs", "mixed", "delta nets"],
)
@pytest.mark.parametrize("syncs", [1, 3])
def test_a_rollout_waits_once_a_sync_and_twice_for_what_ended(
    family: str, samplings: list[Sampling], syncs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of rows, prompts and tokens make no difference, and nothing is copied from pageable memory.

    A sync reads which rows have finished; new rows read nothing.
    """
    made: list[type] = []
    for kind in (GraphStepper, PagedCache):
        noted(monkeypatch, kind, "__init__", lambda self, *_, **__: made.append(type(self)))
    completions, waits = rollout(engine_on_meta(family), requests(*samplings, family=family), syncs)
    expected = [] if family == "qwen3_5" else [PagedCache, GraphStepper]
    assert made == expected[:syncs], "as on a GPU; the first sync comes before the first step"
    assert [len(each) for each in completions] == [ROWS] * 3
    assert sorted(waits.values()) == sorted([2, syncs]), waits


def second_turns(asked: Sequence[Request], first: Sequence[Sequence[Completion]]) -> list[Request]:
    """Requests that continue the first completion of each of these."""
    return [
        replace(
            request,
            id=f"{request.id}/second",
            prompt=replace(request.prompt, token_ids_L=np.append(request.prompt.token_ids_L, [1, 5, 6])),
            keep=False,
            continues=completions[0].id,
        )
        for request, completions in zip(asked, first, strict=True)
    ]


def test_a_second_turn_waits_as_a_first_one_does() -> None:
    engine = engine_on_meta()
    first, kept = rollout(engine, requests(TRAINING, keep=True), syncs=1)
    assert sum(kept.values()) == 1 + 2 + 1, "one for the lengths of all that is kept"
    _, waits = rollout(engine, second_turns(requests(TRAINING), first), syncs=2)
    assert sum(waits.values()) == 2 + 2, waits


class Launches(TorchDispatchMode):
    """Counts the operators on tensors of the device, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple | list) and out else out
        self.count += isinstance(first, Tensor) and first.device == META and not first._is_view()
        return out


def test_later_turns_launch_as_much_for_many_conversations_as_for_one() -> None:
    """Attention of each conversation was several operators per layer: 0.2 seconds a turn of 64 conversations."""
    found = []
    for number in (1, 1, 3):  # the first also tries the kernels
        engine = engine_on_meta()
        asked = requests(TRAINING, keep=True)[:number]
        first, _ = rollout(engine, asked, syncs=1)
        with Launches() as launches:
            rollout(engine, second_turns(asked, first), syncs=1)
        found.append(launches.count)
    assert found[1] == found[2]


def test_weights_of_the_same_memory_wait_for_nothing() -> None:
    engine = engine_on_meta()
    with PretendedDevice() as device:
        engine.load_weights(dict(engine.own_weights()), 1)
    assert not device.waits
