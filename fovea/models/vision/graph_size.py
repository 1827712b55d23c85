"""An estimate of what autograd keeps of a vision pass: by it the engine decides on a graph, and a plan counts it."""

from __future__ import annotations

OF_BLOCK, OF_RECOMPUTED_BLOCK, OF_MERGER, OF_EMBEDDING = 20, 1, 5, 2
"""Numbers per patch and unit of the tower's width: of a trained block, of one that computes all but its input again, of
a merger (its input, norm, and both sides of its activation, and some) and of the patch embedding."""


def graph_bytes(
    patches: int,
    width: int,
    itemsize: int,
    *,
    trained_blocks: int,
    recomputed_blocks: int,
    mergers: int,
    pixels: int,
) -> int:
    """Bytes of the graph of so many patches; `pixels` are the numbers of one, 0 where the embedding is not trained."""
    blocks = OF_BLOCK * trained_blocks + OF_RECOMPUTED_BLOCK * recomputed_blocks
    numbers = blocks + OF_MERGER * mergers + (OF_EMBEDDING if pixels else 0)
    return patches * (numbers * width + pixels) * itemsize
