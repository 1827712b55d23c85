"""Memory of an update: activations, counted by hand, and memory that really runs out."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.torch_memory import AllocationTrace
from fovea.errors import MicrobatchMemoryError, TrainError, is_out_of_memory, memory_for
from fovea.models.recompute import Recompute, recompute_activations
from fovea.models.shared_prefix.layout import PackedRow
from fovea.models.vlm import VLM
from fovea.train.base import Needs
from fovea.train.microbatches import MicrobatchLimit
from fovea.train.ranks import ALONE, Ranks
from fovea.train.torch.optimizer import Optimizer
from fovea.train.update_metrics import ActivationMeter
from fovea.types import Batch
from fovea_gym.errors import OutOfMemoryError
from gym_tests.tables import table
from tests.policies import flat_weights, make_batch, make_policy, many_groups, micro_batcher, pairs_of, train_settings
from tests.tiny_models import tiny
from tests.train.limited_memory import NUM_GROUPS, ROOMY, SPARE_MIB, result

ROWS, WIDTH, HIDDEN = 7, 5, 11
LAYERS = (nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 3))
FROZEN = nn.Linear(WIDTH, HIDDEN).requires_grad_(False)


@table(
    ("module", "x", "floats"),
    [
        # its input; the weight is saved too, and is a parameter
        (LAYERS[0], torch.randn(ROWS, WIDTH), ROWS * WIDTH),
        # the output of tanh is the input of the second layer and no second storage
        (nn.Sequential(*LAYERS), torch.randn(ROWS, WIDTH), ROWS * (WIDTH + HIDDEN)),
        (nn.Sequential(FROZEN, LAYERS[2]), torch.randn(ROWS, WIDTH), ROWS * HIDDEN),
        # a view counts as all that it keeps alive
        (LAYERS[0], torch.randn(10 * ROWS, WIDTH)[:ROWS], 10 * ROWS * WIDTH),
    ],
)
def test_each_layer_keeps_what_it_needs_once(module: nn.Module, x: torch.Tensor, floats: int) -> None:
    meter = ActivationMeter(module)
    with meter(1):
        module(x)
    assert meter.num_bytes == 4 * floats


def test_only_a_larger_pass_is_counted() -> None:
    layer = nn.Linear(WIDTH, HIDDEN)
    meter = ActivationMeter(layer)
    found = []
    for size, rows in ((2, 20), (2, 99), (1, 99), (3, 30)):
        with meter(size):
            layer(torch.randn(rows, WIDTH))
        found.append(meter.num_bytes // (WIDTH * 4))
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
        results.append((metrics, flat_weights(policy)))
    (first, first_weights), (second, second_weights) = results
    assert first == second
    assert torch.equal(first_weights, second_weights)


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


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and a limit of the address space")
def test_an_update_that_runs_out_of_memory_equals_one_with_smaller_micro_batches() -> None:
    command = [sys.executable, "-m", "tests.train.limited_memory"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    limited = json.loads(done.stdout)
    assert limited.pop("microbatch/out_of_memory") >= 1
    max_tokens = limited["microbatch/max_tokens"]
    assert 1_000 < max_tokens < ROOMY / 2

    policy = make_policy(tiny("qwen3_vl"), max_tokens_per_microbatch=ROOMY)
    policy.update(many_groups(3))
    policy.limit_microbatches(int(max_tokens))
    expected = result(policy, policy.update(many_groups(NUM_GROUPS)))
    assert expected.pop("microbatch/out_of_memory") == 0
    assert limited == json.loads(json.dumps(expected))


def test_a_forward_pass_without_a_backward_pass_is_freed() -> None:
    """The meter of activations held its graph, and so its memory, for ever."""
    linear = torch.nn.Linear(4, 4)

    def measured_pass() -> weakref.ref[torch.Tensor]:
        with ActivationMeter(linear)(1):
            return weakref.ref(linear(torch.ones(2, 4)).exp())

    assert measured_pass()() is None


BATCH = make_batch(tiny("qwen3_vl"))
LONGEST = max(prompt.num_tokens + len(sample.token_ids_T) - 1 for prompt, sample in pairs_of(BATCH))
"""Tokens of the longest completion with its prompt."""
OF_TWO = Ranks(rank=1, size=2)


def too_much() -> object:
    return np.empty(2**60, dtype=np.uint8)


def limit_of(ranks: Ranks = ALONE, **train: object) -> MicrobatchLimit:
    return MicrobatchLimit(train_settings(max_tokens_per_microbatch=512, **train), ranks)


def fit(limit: MicrobatchLimit, passes: Callable[[], object] = too_much) -> object:
    return limit.fit(passes, BATCH.groups, micro_batcher(tiny("qwen3_vl")).assignment.cost)


def test_below_the_longest_completion_the_settings_to_change_are_named() -> None:
    limit = limit_of()
    with pytest.raises(
        OutOfMemoryError, match=rf"one completion and its prompt, {LONGEST} tokens; lower rollout\.max_new_tokens or"
    ):
        fit(limit)
    assert limit.max_tokens == LONGEST


def test_a_halved_limit_gives_way_to_a_longer_completion() -> None:
    """It was halved for shorter ones: the run would end with an error about a setting that is large enough."""
    policy, batch = make_policy(tiny("qwen3_vl"), max_tokens_per_microbatch=ROOMY), many_groups(3)
    policy.limit_microbatches(2)
    metrics = policy.update(batch)
    assert np.isfinite(metrics["loss"])
    assert metrics["microbatch/max_tokens"] == 2
    with pytest.raises(TrainError, match=r"does not fit train\.max_tokens_per_microbatch=2"):
        make_policy(tiny("qwen3_vl"), max_tokens_per_microbatch=2).update(batch)


def test_groups_that_are_not_split_are_an_error_at_once() -> None:
    with pytest.raises(OutOfMemoryError, match=r"groups_per_microbatch=3 groups; lower it, or set train\.enable_dyn"):
        fit(limit_of(enable_dynamic_batch_size=False, groups_per_microbatch=3))


def test_one_of_several_ranks_cannot_begin_again_and_the_halving_ends_at_the_longest_completion() -> None:
    """It went on to a limit that no row fits, restart by restart."""
    limit, lowered = limit_of(OF_TWO), []

    def restart() -> None:
        at_most = rf"on rank 1 in a micro-batch of {limit.max_tokens} tokens at most"
        with pytest.raises(MicrobatchMemoryError, match=at_most) as raised:
            fit(limit)
        lowered.append(raised.value.next_max_tokens)
        limit.lower(lowered[-1])

    with pytest.raises(OutOfMemoryError, match=r"of one completion and its prompt.*lower rollout\.max_new_tokens or"):
        [restart() for _ in range(9)]
    assert LONGEST <= lowered[0] <= 256
    assert limit.max_tokens == LONGEST


class Beside:
    """Memory beside the passes, which have room without it only."""

    def __init__(self) -> None:
        self.is_held = True
        self.tries = 0

    def free(self) -> bool:
        was_held, self.is_held = self.is_held, False
        return was_held

    def passes(self) -> str:
        self.tries += 1
        if self.is_held:
            too_much()
        return "done"


def test_what_is_beside_the_passes_is_freed_before_rows_become_smaller(caplog: pytest.LogCaptureFixture) -> None:
    limit, beside = limit_of(), Beside()
    limit.free_memory = beside.free
    assert fit(limit, beside.passes) == "done"
    assert beside.tries == 2
    assert limit.metrics() == {"microbatch/max_tokens": 512, "microbatch/out_of_memory": 0}
    beside.is_held = True  # by the next rollout
    assert fit(limit, beside.passes) == "done"
    assert beside.tries == 3, "it is freed before the passes from then on"
    assert ["before every update from now on" in record.getMessage() for record in caplog.records] == [True]


def test_several_ranks_begin_again_without_what_is_beside_and_with_the_same_limit() -> None:
    limit, beside = limit_of(OF_TWO), Beside()
    limit.free_memory = beside.free
    with pytest.raises(MicrobatchMemoryError, match=r"on rank 1 next to the KV cache") as raised:
        fit(limit, beside.passes)
    assert raised.value.next_max_tokens == 512
    limit.lower(raised.value.next_max_tokens)  # the next attempt
    beside.is_held = True
    assert fit(limit, beside.passes) == "done"


def test_scoring_beside_an_engine_lowers_no_limit() -> None:
    limit, beside = MicrobatchLimit(train_settings(), ALONE), Beside()
    limit.free_memory = beside.free
    before = limit.max_tokens
    of_passes = limit.beside_engine(lambda: (beside.passes(), limit.max_tokens)[1], BATCH.groups)
    assert beside.tries == 2
    assert LONGEST < of_passes < before, "one group at a time"
    with pytest.raises(OutOfMemoryError, match=r"scoring while the engine is awake; lower the memory"):
        limit.beside_engine(too_much, BATCH.groups)
    assert limit.metrics() == {"microbatch/max_tokens": before, "microbatch/out_of_memory": 0}


def test_memory_that_runs_out_in_the_gate_of_several_ranks_lowers_no_limit() -> None:
    """The next attempt began with micro-batches of one group, for the rest of the run."""
    limit = limit_of(OF_TWO)
    limit.free_memory = lambda: True
    with pytest.raises(MicrobatchMemoryError, match=r"rank 1 .*rollout\.engine\.max_batch_tokens") as raised:
        limit.beside_engine(too_much, BATCH.groups)
    assert raised.value.next_max_tokens == limit.max_tokens == 512


def test_a_policy_scores_one_group_at_a_time_beside_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, rows = make_policy(tiny("qwen3_vl")), list[int]()
    forward = type(policy.vlm).forward

    def counted(vlm: VLM, row: PackedRow, **more: Any) -> Any:
        rows[-1] += 1
        return forward(vlm, row, **more)

    monkeypatch.setattr(type(policy.vlm), "forward", counted)
    found = []
    for beside_engine in (False, True):
        rows.append(0)
        needs = Needs(old_logprobs=True, beside_engine=beside_engine)
        found.append([sample.old_logprobs_T for sample in policy.compute_logprobs(BATCH, needs).samples])
    assert rows == [1, len(BATCH.groups)]
    for together, apart in zip(*found, strict=True):
        np.testing.assert_allclose(together, apart, atol=1e-5)


def test_moments_are_there_before_the_first_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that runs out of memory half way could not begin again."""
    policy = make_policy(tiny("qwen3_vl"))
    made: list[Optimizer] = []
    found: list[tuple[int, int]] = []
    make = Optimizer.make_moments

    def noted(optimizer: Optimizer) -> None:
        make(optimizer)
        made.append(optimizer)

    def count(*_: object) -> None:
        (optimizer,) = made
        found.append((len(optimizer.adamw.state), len(optimizer.parameters)))

    monkeypatch.setattr(Optimizer, "make_moments", noted)
    policy.update(Batch(groups=()))
    assert not made, "an update without groups needs none"
    policy.vlm.register_forward_pre_hook(count)
    policy.update(make_batch(tiny("qwen3_vl")))
    assert [moments == weights for moments, weights in found] == [True]


@pytest.mark.parametrize("allocate", [too_much, lambda: torch.empty(2**50)], ids=["numpy", "torch"])
def test_what_ran_out_of_memory_is_named(allocate: Callable[[], object]) -> None:
    refused = pytest.raises(OutOfMemoryError, match="memory ran out in the test; allocate less")
    with refused, memory_for("the test", "allocate less"):
        allocate()


def test_other_errors_are_none_of_memory() -> None:
    with pytest.raises(RuntimeError, match=r"^other$"), memory_for("the test", "nothing"):
        raise RuntimeError("other")
    assert not is_out_of_memory(RuntimeError("could not create a primitive descriptor for a convolution"))
    with pytest.raises(MicrobatchMemoryError), memory_for("the test", "nothing"):
        raise MicrobatchMemoryError("named already", 1)


@pytest.mark.gpu
def test_a_gpu_that_is_full_halves_the_micro_batches() -> None:
    parts = tiny("qwen3_vl")
    parts.network.cuda()
    policy = make_policy(parts, max_tokens_per_microbatch=ROOMY)
    policy.update(many_groups(3))
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + SPARE_MIB * 2**20) / total)
    try:
        metrics = policy.update(many_groups(NUM_GROUPS))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert metrics["microbatch/out_of_memory"] >= 1
    assert metrics["microbatch/max_tokens"] < ROOMY / 2
    assert np.isfinite(metrics["loss"])
