"""Which graph a step runs through, and what its padding does; a rerun stands for the capture."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from fovea.rollout.embedded.decode_step import (
    CudaCapture,
    DecodeGraphs,
    GraphInputs,
    SampledTokens,
    captured_rows,
    rerun,
)
from fovea.rollout.embedded.sampler import Draw, SamplingNeeds, needs_of, row_settings, sample_tokens
from fovea.types import Sampling
from fovea.utils.tensor_records import map_tensors

SAMPLED, GREEDY = Sampling(max_new_tokens=4, temperature=0.7), Sampling(max_new_tokens=4, temperature=0)
TRUNCATED = Sampling(max_new_tokens=4, top_k=20, top_p=0.9, min_p=0.01)
NEEDS = needs_of([SAMPLED])


def inputs(rows: int, width: int = 3, sampling: Sampling = SAMPLED) -> GraphInputs:
    count = torch.arange(1, rows + 1)
    return GraphInputs(
        token_B=count,
        position_B=count + 1,
        tokens_B=count + 2,
        table_BX=(count[:, None] * 10 + torch.arange(width)).to(torch.int32),
        uniform_B=torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(rows)),
        settings=row_settings([sampling] * rows, torch.device("cpu")),
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

    graphs = DecodeGraphs(lambda x, _: (x.token_B * 2, -x.uniform_B), capture)
    for rows in (40, 5, 17, 64, 1, 33):
        given = inputs(rows)
        token_B, logprob_B = graphs(NEEDS, given)
        assert token_B.tolist() == [2 * (row + 1) for row in range(rows)]
        assert torch.equal(logprob_B, -given.uniform_B)
    assert captured == [64, 32, 16, 8]
    graphs(NEEDS, inputs(70))
    assert captured == [64, 32, 16, 8, 128]
    graphs(needs_of([GREEDY]), inputs(4, sampling=GREEDY))
    assert captured == [64, 32, 16, 8, 128, 8], "other operations are another graph"
    graphs(NEEDS, inputs(9, width=6))
    graphs(NEEDS, inputs(3, width=6))
    assert captured == [64, 32, 16, 8, 128, 8, 16, 8], "a wider table is another graph"


def test_rows_behind_the_live_ones_point_at_the_scratch_page() -> None:
    seen: list[GraphInputs] = []

    def run(x: GraphInputs, _: SamplingNeeds) -> SampledTokens:
        seen.append(x)
        return x.token_B, x.uniform_B

    graphs = DecodeGraphs(run, rerun)
    graphs(NEEDS, inputs(8))
    graphs(NEEDS, inputs(5))
    assert seen[0] is seen[1], "the graph reads the same memory each time"
    assert seen[1].table_BX[5:].eq(0).all()
    assert seen[1].tokens_B.tolist() == [3, 4, 5, 6, 7, 0, 0, 0]
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
