"""Bytes that a decode step reads from the KV cache, counted on the host: `python -m benchmarks.gpu --count`.

The counts are those of the page tables that the engine makes for such a batch. No GPU is needed, and nothing is timed.
"""

from __future__ import annotations

from typing import NamedTuple

from rich.table import Table

from benchmarks.printing import as_table
from fovea.rollout.embedded.paged_cache import TILE_ROWS, shared_prompts
from fovea.rollout.embedded.tuning import PAGE_TOKENS

BYTES = 2
"""Of a key or value in bfloat16."""
ROWS = 512
GROUPS = (1, 2, 4, 8, 16)
"""Completions of a prompt."""
PROMPT_TOKENS, SAMPLED_TOKENS = 356, 256
"""A prompt of Geometry3K with 256 visual tokens, and half of 512 sampled tokens."""


class KeyShape(NamedTuple):
    """Layers, key heads and their width: of Qwen3-VL-2B and 8B in their configurations on the hub."""

    name: str
    layers: int
    key_heads: int
    width: int


SHAPES = (KeyShape("2B", 28, 8, 128), KeyShape("8B", 36, 8, 128))


def bytes_read(shape: KeyShape, samples: int) -> tuple[int, int]:
    """Bytes of keys and values that a step of ROWS rows reads, without and with shared reads of prompts."""
    full = PROMPT_TOKENS // PAGE_TOKENS * PAGE_TOKENS
    groups = [(full, range(start, start + samples)) for start in range(0, ROWS, samples)]
    shared = shared_prompts(groups, ROWS, TILE_ROWS if samples > 1 else 0)
    alone = ROWS * (PROMPT_TOKENS + SAMPLED_TOKENS)
    leads_B = (shared.mates_BR >= 0).any(1)
    read = alone - int(shared.tokens_B.sum()) + int(shared.tokens_B[leads_B].sum())
    of_token = 2 * BYTES * shape.layers * shape.key_heads * shape.width
    return alone * of_token, read * of_token


def table() -> Table:
    """The table that `--count` prints."""
    rows = [
        (shape.name, str(samples), *(f"{each / 1e9:.1f}" for each in found), f"{found[1] / found[0]:.2f}")
        for shape in SHAPES
        for samples in GROUPS
        for found in [bytes_read(shape, samples)]
    ]
    title = (
        f"GB of keys and values read by a decode step of {ROWS} rows, {PROMPT_TOKENS} + {SAMPLED_TOKENS} tokens each"
    )
    return as_table(title, ("model", "completions of a prompt", "by row", "prompts shared", "ratio"), rows, num_left=1)
