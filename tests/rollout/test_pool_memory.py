"""How large the pool of pages is, and that it and its graphs stay where an update leaves them room."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import pytest
import torch

from fovea.config.sections import Warmup
from fovea.errors import EngineError
from fovea.models.trainable import merged_weights
from fovea.models.vlm import VLM
from fovea.rollout.embedded import memory, tuning
from fovea.rollout.embedded.decode_step import SampledTokens
from fovea.rollout.embedded.engine import EmbeddedEngine
from fovea.rollout.embedded.memory import default_bytes
from fovea.rollout.embedded.paged_cache import PagedCache
from fovea.train.base import SftExample
from fovea.types import Completion, Sampling
from fovea.wiring.engine import connect_free_memory
from fovea_gym.utils.event_loop import wait_for
from tests.policies import make_batch, make_policy, policy_on, train_settings
from tests.rollout.drawing import generate, make_engine, same, seeded
from tests.tiny_models import mixed_prompts, tiny

PARTS = tiny("qwen3_vl")
"""Its prompts and sizes are those of each test's own model, whose weights change."""
PAGED: dict[str, Any] = {"cache": "paged", "page_tokens": 4}
TOKENS = 2_000


class FakeGpu:
    """Free and total bytes, as a driver tells them, of a GPU whose pool the engine makes."""

    def __init__(self, free: int, total: int) -> None:
        self.free, self.total = free, total
        self.pools: list[weakref.ref[torch.Tensor]] = []
        self.captures = 0

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pools that are held."""
        return sum(pool.nbytes for ref in self.pools if (pool := ref()) is not None)

    def memory(self, device: torch.device | None) -> tuple[int, int] | None:
        return None if device is None else (self.free - self.pool_bytes, self.total)

    def allocate(self, num_bytes: int) -> None:
        """As torch's allocator, for tensors that are freed at once."""
        if num_bytes > self.free - self.pool_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu(10**9, 2 * 10**9)
    make_cache = memory.make_cache

    def noted(*arguments: Any, **more: Any) -> Any:
        cache: Any = make_cache(*arguments, **more)
        if isinstance(cache, PagedCache):
            fake.pools += map(weakref.ref, cache.pools)
        return cache

    def capture(function: Callable[[], SampledTokens]) -> Callable[[], SampledTokens]:
        fake.captures += 1
        return function

    monkeypatch.setattr(memory, "make_cache", noted)
    monkeypatch.setattr(tuning, "rerun", capture)
    monkeypatch.setattr(memory, "device_memory", fake.memory)
    return fake


def roll_out(engine: EmbeddedEngine, n: int = 2) -> list[Sequence[Completion]]:
    return generate(engine, mixed_prompts(PARTS), seeded(3, max_new_tokens=9), n)


def captures_of_steps(
    gpu: FakeGpu, *updates: int, counts: Sequence[int] = (5, 6, 4, 1), can_free_memory: bool = False
) -> list[int]:
    """Captures of the rollouts of steps, whose updates take so many bytes and change the weights in place."""
    parts, captures = tiny("qwen3_vl"), []
    engine = make_engine(parts, TOKENS, can_free_memory=can_free_memory, **PAGED)
    for update_bytes, n in zip(updates, cycle(counts), strict=False):
        before = gpu.captures
        together = roll_out(engine, n)
        captures.append(gpu.captures - before)
        alone = roll_out(make_engine(parts), n)
        assert all(same(a, b) for a, b in zip(alone, together, strict=True)), "sampled with the present weights"
        wait_for(engine.sleep())
        with torch.no_grad():
            for parameter in parts.network.parameters():
                parameter.mul_(0.99)
        engine.load_weights(dict(merged_weights(parts.network)), version=8)
        gpu.free -= update_bytes  # torch's allocator holds on to it
        wait_for(engine.wake())
        gpu.free += update_bytes
    captures.append(gpu.pool_bytes)
    return captures


SMALL, LARGE, HUGE = [5 * 10**8] * 4, [8 * 10**8] * 4, [95 * 10**7] * 4
"""Bytes of the updates of four steps."""


def test_graphs_are_captured_once_where_the_pool_fits_beside_the_update(
    gpu: FakeGpu, caplog: pytest.LogCaptureFixture
) -> None:
    # 15 rows, 18 rows, and 12 after a second update that was measured without the pool
    assert captures_of_steps(gpu, *SMALL)[:-1] == [2, 3, 2, 0]
    assert [record.getMessage().partition(", ")[2] for record in caplog.records] == [
        "which is freed for the update",
        "which stays during updates, with the CUDA graphs",
    ]


def test_a_pool_that_an_update_can_free_stays_unless_the_first_update_leaves_too_little(gpu: FakeGpu) -> None:
    *captures, pool_bytes = captures_of_steps(gpu, *SMALL, counts=(6, 5, 4, 6), can_free_memory=True)
    assert captures == [3, 0, 0, 0]
    assert pool_bytes
    assert captures_of_steps(gpu, *HUGE, counts=(6, 6, 6, 6), can_free_memory=True) == [3, 0, 3, 3, 0]


def test_an_update_without_memory_frees_the_pool_and_goes_on(gpu: FakeGpu, caplog: pytest.LogCaptureFixture) -> None:
    """With the same micro-batches, to the same weights as with plenty of memory; it is printed once."""
    found, captures = [], []
    for update_bytes in (0, gpu.free):
        parts = tiny("qwen3_vl")
        engine = make_engine(parts, TOKENS, can_free_memory=True, **PAGED)
        policy = make_policy(parts)
        connect_free_memory(policy, engine)
        policy.vlm.register_forward_pre_hook(lambda *_, num_bytes=update_bytes: gpu.allocate(num_bytes))
        caplog.clear()
        for step in range(3):
            before = gpu.captures
            roll_out(engine, n=5)
            captures.append(gpu.captures - before)
            wait_for(engine.sleep())
            found.append(policy.update(make_batch(parts, step)))
            engine.load_weights(dict(merged_weights(parts.network)), version=8 + step)
            wait_for(engine.wake())
    assert captures == [2, 0, 0, 2, 2, 2]
    assert found[3:] == found[:3]
    assert found[5]["microbatch/out_of_memory"] == 0
    printed = [record.getMessage() for record in caplog.records]
    assert sum("memory ran out next to the KV cache" in line for line in printed) == 1
    assert printed[-1].endswith("which is freed for the update")
    assert len(printed) == 3


def test_a_step_of_the_warm_up_has_the_memory_of_a_pool_that_stays_in_rl(gpu: FakeGpu) -> None:
    parts = tiny("qwen3_vl")
    engine = make_engine(parts, TOKENS, can_free_memory=True, **PAGED)
    engine.load_weights(dict(merged_weights(parts.network)), version=0)  # that of the warm-up
    policy = policy_on(VLM(parts.network, parts.processor.banned_ids), train_settings(), warmup=Warmup())
    connect_free_memory(policy, engine)
    policy.vlm.register_forward_pre_hook(lambda *_: gpu.allocate(gpu.free))
    pair = SftExample(prompt=mixed_prompts(parts)[0], answer_ids=(5, 6, 7))
    for _ in range(2):
        roll_out(engine)
        assert gpu.pool_bytes
        wait_for(engine.sleep())
        policy.sft([pair])
        assert not gpu.pool_bytes
        wait_for(engine.wake())
    roll_out(engine)
    wait_for(engine.sleep())
    assert gpu.pool_bytes, "it stays in the first update"


def test_a_sleeping_engine_frees_its_copies_with_its_memory(gpu: FakeGpu) -> None:
    parts = tiny("qwen3_vl")
    own = dict(merged_weights(parts.network))
    engine = make_engine(parts, TOKENS, synced=own, can_free_memory=True, **PAGED)
    assert not engine.free_memory(), "nothing is held yet"
    roll_out(engine)
    assert engine.free_memory()
    assert not gpu.pool_bytes
    assert all(weight.untyped_storage().nbytes() for weight in own.values()), "it is awake and draws with them"
    roll_out(engine)
    wait_for(engine.sleep())
    assert gpu.pool_bytes
    assert engine.free_memory()
    assert not gpu.pool_bytes
    assert not any(weight.untyped_storage().nbytes() for weight in own.values())
    with pytest.raises(EngineError, match="were sent; run a weight sync first"):
        wait_for(engine.wake())


def test_the_pool_is_freed_for_an_update_that_needs_its_memory(gpu: FakeGpu) -> None:
    """Without a search for cycles of references, which Python makes when it likes to."""
    gc.disable()
    try:
        assert captures_of_steps(gpu, *LARGE) == [2, 3, 2, 1, 0]
    finally:
        gc.enable()


def test_a_pool_that_no_longer_fits_beside_an_update_is_freed(gpu: FakeGpu) -> None:
    assert captures_of_steps(gpu, *SMALL, *HUGE)[3:-1] == [0, 0, 1, 2, 1]


def test_an_update_without_signal_is_no_measure(gpu: FakeGpu) -> None:
    """It takes next to nothing, and the one after it what all others do."""
    engine = make_engine(PARTS, TOKENS, **PAGED)
    for update_bytes in (0, 8 * 10**8, 0, 0):
        roll_out(engine, n=5)
        wait_for(engine.sleep())
        assert gpu.pool_bytes == 0
        gpu.free -= update_bytes
        wait_for(engine.wake())
        gpu.free += update_bytes


@pytest.mark.parametrize("stay", [True, False])
def test_copies_of_weights_stay_with_the_pool_or_go_with_it(gpu: FakeGpu, stay: bool) -> None:
    """Those of an engine whose own weights every weight sync brings: graphs hold the addresses of both."""
    parts = tiny("qwen3_vl")
    own = dict(merged_weights(parts.network))
    engine = make_engine(parts, TOKENS, synced=own, **PAGED)
    policy = {name: weight.clone() for name, weight in own.items()}
    roll_out(engine)
    spare, copies = gpu.total // 10, sum(weight.nbytes for weight in own.values())
    gpu.free = spare + gpu.pool_bytes + (copies if stay else copies // 2)  # after each update
    for _ in range(3):  # during the first two nothing stays, since they are measured
        wait_for(engine.sleep())
        held = {bool(weight.untyped_storage().nbytes()) for weight in own.values()}
        for name, weight in own.items():  # as a weight sync does
            weight.untyped_storage().resize_(weight.nbytes)
            weight.copy_(policy[name])
        wait_for(engine.wake())
        roll_out(engine)
    assert held == {stay}


def test_a_default_pool_is_sized_by_free_memory_and_to_stay() -> None:
    """Four fifths before the first update; what leaves room beside updates, if that is half of it or more."""
    assert default_bytes(50 * 2**30) == 40 * 2**30
    stays = [default_bytes(50 * 2**30, room * 2**30) // 2**30 for room in (20, 19, 45, -5)]
    assert stays == [20, 40, 40, 40], "the rest is for prefill and sampling"


@pytest.mark.parametrize(
    ("set_tokens", "settings", "tokens", "share"),
    [(None, PAGED, r"\d+", 0.8), (None, {}, "65536", 0.0), (50, {}, "50", 0)],
)
def test_an_engine_without_a_setting_sizes_its_pool_and_on_a_cpu_has_a_budget(
    gpu: FakeGpu, set_tokens: int | None, settings: dict[str, Any], tokens: str, share: float
) -> None:
    """A request beyond it says what to change."""
    gpu.free = 10**7
    engine = make_engine(PARTS, set_tokens, **settings)
    with pytest.raises(EngineError, match=rf"rollout\.engine\.max_batch_tokens={tokens}; raise it, or lower rollout"):
        generate(engine, mixed_prompts(PARTS)[:1], [Sampling(max_new_tokens=100_000)], n=1)
    assert gpu.pool_bytes == pytest.approx(share * gpu.free, rel=0.01)
