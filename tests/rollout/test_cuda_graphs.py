"""Which graph a step runs through, and what its padding does; a rerun stands for the capture."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fovea.rollout.embedded.decode_step import CudaCapture, DecodeGraphs, GraphInputs, captured_rows, rerun


def inputs(rows: int, width: int = 3) -> GraphInputs:
    count = torch.arange(1, rows + 1)
    table = (count[:, None] * 10 + torch.arange(width)).to(torch.int32)
    return GraphInputs(token_B=count, position_B=count + 1, tokens_B=count + 2, table_BX=table)


def test_few_rows_are_padding() -> None:
    rows = (1, 2, 3, 9, 16, 17, 33, 100, 128, 129, 161, 256, 257, 512)
    assert [captured_rows(each) for each in rows] == [1, 2, 4, 16, 16, 32, 48, 112, 128, 160, 192, 256, 288, 512]
    assert len({captured_rows(each) for each in range(1, 513)}) == 24
    assert all(captured_rows(captured_rows(each)) == captured_rows(each) >= each for each in range(1, 600))


def test_steps_share_the_graph_of_the_next_number_of_rows() -> None:
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_graphs_of_one_pool_replay_in_any_order() -> None:
    weight = torch.randn(64, 64, device="cuda")

    def run(x: GraphInputs) -> Tensor:
        return ((x.token_B[:, None].float() @ weight[:1]).relu() @ weight).tanh()

    graphs = DecodeGraphs(run, CudaCapture())
    for rows in (40, 5, 17, 40, 16, 5, 33):
        given = inputs(rows)
        on_gpu = GraphInputs(**{name: getattr(given, name).cuda() for name in GraphInputs.__slots__})
        torch.testing.assert_close(graphs(on_gpu), run(on_gpu))
