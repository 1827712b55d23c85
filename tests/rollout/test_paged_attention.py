"""Paged decoding on CUDA: the trial before its use, and the Triton kernel in Triton's interpreter and compiler.

Triton comes with CUDA builds of torch, and to CPUs with SGLang: the tests that need it are part of SGLang's suite.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from fovea.models.varlen import HeadShape
from fovea.rollout.embedded.paged_attention import TOLERANCE, difference, paged_refusal
from fovea.rollout.embedded.paged_cache import gathered_attention
from fovea.rollout.embedded.tuning import decoding_note
from tests.meta_device import META
from tests.tiny_models import tiny

CPU = torch.device("cpu")
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


@pytest.mark.parametrize(
    ("kernel", "rows", "keys"),
    [
        (wrong_from_two_rows, 2, 40),
        (wrong_beyond(128), 3, 130),
        (wrong_beyond(256), 40, 300),
        (without_shared_pages, 3, 130),
        (unwritten_rows, 300, 600),
    ],
    ids=["wrong from two rows", "wrong beyond 128 keys", "wrong beyond 256 keys", "lost prompts", "unwritten rows"],
)
def test_a_wrong_kernel_is_refused_with_where_it_is_wrong(kernel: object, rows: int, keys: int) -> None:
    found = difference(kernel, SHAPE, 16)  # type: ignore[arg-type]
    assert found is not None
    assert found.startswith(f"for {rows} rows of up to {keys} keys, its outputs have a relative error of ")


def test_a_head_size_that_triton_cannot_hold_is_refused() -> None:
    assert (
        paged_refusal(HeadShape(CPU, torch.bfloat16, 4, 2, 80), 32)
        == "its head size must be a power of two and at least 16, not 80"
    )


def test_a_run_on_a_gpu_prints_how_it_decodes() -> None:
    text = tiny("qwen3_vl").network.config.text_config
    assert decoding_note(text, META, torch.float32).startswith(
        "decoding: paged attention by a Triton kernel (tried on 300 "
    )
    text.head_dim = 24
    note = decoding_note(text, META, torch.bfloat16)
    assert note.startswith("slow: decoding: ")
    assert "its head size must be a power of two and at least 16, not 24" in note
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
