"""Memory of the backward pass, against modules whose saved tensors can be counted by hand."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from benchmarks.torch_memory import AllocationTrace
from fovea.models.recompute import Recompute, recompute_activations
from fovea.train.update_metrics import ActivationMeter
from tests.policies import make_batch, make_policy
from tests.tiny_models import tiny

FLOAT_BYTES = 4
ROWS, WIDTH, HIDDEN = 7, 5, 11


def measured(module: nn.Module, x: torch.Tensor) -> int:
    meter = ActivationMeter(module)
    with meter(1):
        module(x)
    return meter.num_bytes


def test_a_linear_layer_keeps_its_input() -> None:
    """The weight is saved too, and is a parameter."""
    assert measured(nn.Linear(WIDTH, HIDDEN), torch.randn(ROWS, WIDTH)) == ROWS * WIDTH * FLOAT_BYTES


def test_a_network_keeps_what_each_layer_needs_once() -> None:
    """The first layer its input, tanh its output, which is the input of the second layer and no second storage."""
    network = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 3))
    assert measured(network, torch.randn(ROWS, WIDTH)) == (ROWS * WIDTH + ROWS * HIDDEN) * FLOAT_BYTES


def test_a_frozen_layer_keeps_no_input() -> None:
    network = nn.Sequential(nn.Linear(WIDTH, HIDDEN).requires_grad_(False), nn.Linear(HIDDEN, 3))
    assert measured(network, torch.randn(ROWS, WIDTH)) == ROWS * HIDDEN * FLOAT_BYTES


def test_a_view_counts_as_all_that_it_keeps_alive() -> None:
    """Ten times as many rows as the layer saw."""
    x = torch.randn(10 * ROWS, WIDTH)
    assert measured(nn.Linear(WIDTH, HIDDEN), x[:ROWS]) == 10 * ROWS * WIDTH * FLOAT_BYTES


def test_only_a_larger_pass_is_counted() -> None:
    layer = nn.Linear(WIDTH, HIDDEN)
    meter = ActivationMeter(layer)
    found = []
    for size, rows in ((2, 20), (2, 99), (1, 99), (3, 30)):
        with meter(size):
            layer(torch.randn(rows, WIDTH))
        found.append(meter.num_bytes // (WIDTH * FLOAT_BYTES))
    assert found == [20, 20, 20, 30]
    assert meter.gib == meter.num_bytes / 2**30


def test_what_is_counted_is_freed_layer_by_layer() -> None:
    """The peak of a pass is the same whether it is measured or not."""
    network, x = nn.Sequential(*[nn.Linear(WIDTH, WIDTH), nn.Tanh()] * 10), torch.randn(1000, WIDTH)

    def peak(size: int) -> list[int]:
        meter, trace = ActivationMeter(network), AllocationTrace()
        trace.start()
        with torch.profiler.record_function("step"):
            with meter(size):
                loss = network(x).sum()
            loss.backward()
            network.zero_grad()
        trace.stop()
        return trace.peaks(["step"])["step"]

    assert peak(size=1) == peak(size=0)


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_counting_changes_no_gradient(recompute: Recompute, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for counts in (True, False):
        parts = tiny("qwen3_vl")
        recompute_activations(parts.network, recompute)
        policy = make_policy(parts)
        if not counts:
            monkeypatch.setattr(ActivationMeter, "__call__", lambda *_: nullcontext())
        metrics = policy.update(make_batch(parts))
        assert (metrics.pop("memory/activations_gib") > 0) is counts
        results.append((metrics, [p.detach().clone() for p in parts.network.parameters()]))
    (first, first_weights), (second, second_weights) = results
    assert first == second
    assert all(torch.equal(a, b) for a, b in zip(first_weights, second_weights, strict=True))


def gib(recompute: Recompute = "none", **train: object) -> float:
    parts = tiny("qwen3_vl")
    recompute_activations(parts.network, recompute)
    return make_policy(parts, **train).update(make_batch(parts))["memory/activations_gib"]


def test_smaller_rows_and_recomputed_layers_keep_less() -> None:
    whole, rows = gib(), gib(max_tokens_per_microbatch=100)
    selective, recomputed = gib("selective"), gib("full")
    assert rows < whole
    assert recomputed < selective < whole
    assert recomputed < whole / 2
