"""Which graph a step runs through, and what its padding does; a rerun stands for the capture."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fovea.rollout.embedded.decode_step import DecodeGraphs, GraphInputs, rerun


def inputs(rows: int, width: int = 3) -> GraphInputs:
    count = torch.arange(1, rows + 1)
    table = (count[:, None] * 10 + torch.arange(width)).to(torch.int32)
    return GraphInputs(token_B=count, position_B=count + 1, tokens_B=count + 2, table_BX=table)


def test_steps_share_the_graph_of_the_next_power_of_two() -> None:
    captured: list[int] = []

    def capture(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        captured.append(len(function()))
        return function

    graphs = DecodeGraphs(lambda x: x.token_B[:, None] * 2.0, capture)
    for rows in (5, 8, 3, 6, 1, 4):
        assert graphs(inputs(rows))[:, 0].tolist() == [2.0 * (row + 1) for row in range(rows)]
    assert captured == [8, 4, 1]
    graphs(inputs(4, width=6))
    assert captured == [8, 4, 1, 4], "a wider table is another graph"


def test_rows_behind_the_live_ones_point_at_the_scratch_page() -> None:
    seen: list[GraphInputs] = []

    def run(x: GraphInputs) -> Tensor:
        seen.append(x)
        return x.token_B[:, None].float()

    graphs = DecodeGraphs(run, rerun)
    graphs(inputs(8))
    graphs(inputs(5))
    assert seen[0] is seen[1], "the graph reads the same memory each time"
    assert seen[1].table_BX[5:].eq(0).all()
    assert seen[1].tokens_B.tolist() == [3, 4, 5, 6, 7, 0, 0, 0]
    assert torch.equal(seen[1].table_BX[:5], inputs(5).table_BX)
