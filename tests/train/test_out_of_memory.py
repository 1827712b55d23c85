"""Memory that really runs out in an update: the micro-batches are halved, and nothing else about the step changes."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fovea.config.sections import Train
from fovea.errors import MicrobatchMemoryError, TrainError, is_out_of_memory, memory_for
from fovea.models.shared_prefix.layout import PackedRow
from fovea.models.vlm import VLM
from fovea.train.base import Needs
from fovea.train.microbatches import MicrobatchLimit
from fovea.train.ranks import ALONE, Ranks
from fovea.train.torch.optimizer import Optimizer
from fovea.train.update_metrics import ActivationMeter
from fovea.types import Batch
from fovea_gym.errors import OutOfMemoryError
from tests.policies import make_batch, make_policy, many_groups, micro_batcher, train_settings
from tests.tiny_models import tiny
from tests.train.limited_memory import NUM_GROUPS, ROOMY, SPARE_MIB, result


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


def too_much() -> object:
    return np.empty(2**60, dtype=np.uint8)


def fail(limit: MicrobatchLimit, batch: Batch) -> None:
    limit.fit(too_much, batch.groups, micro_batcher(tiny("qwen3_vl")).assignment.cost)


def longest(batch: Batch) -> int:
    """Tokens of the longest completion with its prompt."""
    return max(g.prompt.num_tokens + len(s.token_ids_T) - 1 for g in batch.groups for s in g.samples)


def test_below_the_longest_completion_the_settings_to_change_are_named() -> None:
    parts = tiny("qwen3_vl")
    limit = MicrobatchLimit(train_settings(), ALONE)
    batch = make_batch(parts)
    with pytest.raises(
        OutOfMemoryError,
        match=rf"one completion and its prompt, {longest(batch)} tokens; lower rollout\.max_new_tokens or",
    ):
        fail(limit, batch)
    assert limit.max_tokens == longest(batch)


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
    train = Train.model_validate({"enable_dynamic_batch_size": False, "groups_per_microbatch": 3})
    with pytest.raises(OutOfMemoryError, match=r"groups_per_microbatch=3 groups; lower it, or set train\.enable_dyn"):
        fail(MicrobatchLimit(train, ALONE), make_batch(tiny("qwen3_vl")))


def test_one_of_several_ranks_cannot_begin_again() -> None:
    limit = MicrobatchLimit(train_settings(max_tokens_per_microbatch=512), Ranks(rank=1, size=2))
    batch = make_batch(tiny("qwen3_vl"))
    with pytest.raises(MicrobatchMemoryError, match=r"on rank 1 in a micro-batch of 512 tokens at most") as raised:
        fail(limit, batch)
    assert longest(batch) <= raised.value.next_max_tokens <= 256


def test_among_several_ranks_the_halving_ends_at_the_longest_completion() -> None:
    """It went on to a limit that no row fits, restart by restart."""
    limit = MicrobatchLimit(train_settings(max_tokens_per_microbatch=512), Ranks(rank=1, size=2))
    batch = make_batch(tiny("qwen3_vl"))
    for _ in range(9):
        with pytest.raises(OutOfMemoryError) as raised:
            fail(limit, batch)
        if not isinstance(raised.value, MicrobatchMemoryError):
            break
        limit.lower(raised.value.next_max_tokens)
    assert "of one completion and its prompt" in str(raised.value)
    assert "lower rollout.max_new_tokens or model.max_pixels" in str(raised.value)
    assert limit.max_tokens == longest(batch)


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


def fit(limit: MicrobatchLimit, beside: Beside) -> str:
    batch = make_batch(tiny("qwen3_vl"))
    return limit.fit(beside.passes, batch.groups, micro_batcher(tiny("qwen3_vl")).assignment.cost)


def test_what_is_beside_the_passes_is_freed_before_micro_batches_become_smaller(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limit, beside = MicrobatchLimit(train_settings(max_tokens_per_microbatch=512), ALONE), Beside()
    limit.free_memory = beside.free
    assert fit(limit, beside) == "done"
    assert beside.tries == 2
    assert limit.metrics() == {"microbatch/max_tokens": 512, "microbatch/out_of_memory": 0}
    beside.is_held = True  # by the next rollout
    assert fit(limit, beside) == "done"
    assert beside.tries == 3, "it is freed before the passes from then on"
    assert ["before every update from now on" in record.getMessage() for record in caplog.records] == [True]


def test_several_ranks_begin_again_without_what_is_beside_and_with_the_same_limit() -> None:
    limit, beside = MicrobatchLimit(train_settings(max_tokens_per_microbatch=512), Ranks(rank=1, size=2)), Beside()
    limit.free_memory = beside.free
    with pytest.raises(MicrobatchMemoryError, match=r"on rank 1 next to the KV cache") as raised:
        fit(limit, beside)
    assert raised.value.next_max_tokens == 512
    limit.lower(raised.value.next_max_tokens)  # the next attempt
    beside.is_held = True
    assert fit(limit, beside) == "done"


def test_scoring_beside_an_engine_lowers_no_limit() -> None:
    limit, beside, batch = MicrobatchLimit(train_settings(), ALONE), Beside(), make_batch(tiny("qwen3_vl"))
    limit.free_memory = beside.free
    before = limit.max_tokens
    of_passes = limit.beside_engine(lambda: (beside.passes(), limit.max_tokens)[1], batch.groups)
    assert beside.tries == 2
    assert longest(batch) < of_passes < before, "one group at a time"
    with pytest.raises(OutOfMemoryError, match=r"scoring while the engine is awake; lower the memory"):
        limit.beside_engine(too_much, batch.groups)
    assert limit.metrics() == {"microbatch/max_tokens": before, "microbatch/out_of_memory": 0}


def test_memory_that_runs_out_in_the_gate_of_several_ranks_lowers_no_limit() -> None:
    """The next attempt began with micro-batches of one group, for the rest of the run."""
    limit = MicrobatchLimit(train_settings(max_tokens_per_microbatch=512), Ranks(rank=1, size=2))
    limit.free_memory = lambda: True
    with pytest.raises(MicrobatchMemoryError, match=r"rank 1 .*rollout\.engine\.max_batch_tokens") as raised:
        limit.beside_engine(too_much, make_batch(tiny("qwen3_vl")).groups)
    assert raised.value.next_max_tokens == limit.max_tokens == 512


def test_a_policy_scores_one_group_at_a_time_beside_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, batch, rows = make_policy(tiny("qwen3_vl")), make_batch(tiny("qwen3_vl")), list[int]()
    forward = type(policy.vlm).forward

    def counted(vlm: VLM, row: PackedRow, **more: Any) -> Any:
        rows[-1] += 1
        return forward(vlm, row, **more)

    monkeypatch.setattr(type(policy.vlm), "forward", counted)
    found = []
    for beside_engine in (False, True):
        rows.append(0)
        needs = Needs(old_logprobs=True, beside_engine=beside_engine)
        found.append([sample.old_logprobs_T for sample in policy.compute_logprobs(batch, needs).samples])
    assert rows == [1, len(batch.groups)]
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


def too_large_for_torch() -> object:
    return torch.empty(2**50)


@pytest.mark.parametrize("allocate", [too_much, too_large_for_torch], ids=["numpy", "torch"])
def test_what_ran_out_of_memory_is_named(allocate: Callable[[], object]) -> None:
    with (
        pytest.raises(OutOfMemoryError, match="memory ran out in the test; allocate less"),
        memory_for("the test", "allocate less"),
    ):
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
