"""What `benchmarks.floors` says that a step has to do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.cases import CASES
from benchmarks.floors import MachineRates, Part, floor_seconds, parts_of, sizes_of
from benchmarks.ours import Ours
from fovea.models.flops import FORWARD, Passes, training_passes
from fovea.tools.probe.rates import Rates

CASE = replace(CASES["tiny"], prompts=2, samples=3, completion_tokens=5)
MACHINE = MachineRates(large=Rates(gemm=100.0, attention=10.0, read=50.0, copy=20.0), thin_gemm=40.0, weight_read=30.0)


@pytest.mark.parametrize("reuses", [False, True])
@pytest.mark.parametrize("freeze_vision", [False, True])
def test_the_parts_add_up_to_the_work_of_the_model(freeze_vision: bool, reuses: bool) -> None:
    """What the update takes over from the rollout spares it one forward pass of linear layers, head and tower."""
    case = replace(CASE, freeze_vision=freeze_vision)
    sizes = sizes_of(case, Ours(case, 1))
    parts = parts_of(case, sizes, reuses=reuses)
    passes = training_passes(lora=False, trains_vision=not freeze_vision, features_cached=freeze_vision)
    vision = 0 if freeze_vision else 1
    once = Passes(linear=1, attention=0, vision=vision, vision_attention=vision)
    for phase, way in (("rollout", FORWARD), ("update", passes)):
        made = sum(part.linear + part.attention for part in parts if part.phase == phase)
        whole = sum(
            sizes.work.prompt(prompt.num_tokens, prompt.images, way)
            + 3 * sizes.work.completion(5, prompt.num_tokens, way)
            for prompt in sizes.prompts
        )
        spared = sum(
            sizes.work.prompt(prompt.num_tokens, prompt.images, once)
            + 3 * (4 * sizes.work.token + 5 * sizes.work.action)
            for prompt in sizes.prompts
        )
        assert made == pytest.approx(whole - spared * (reuses and phase == "update"))


def test_decoding_reads_every_weight_and_the_cached_keys_at_each_step() -> None:
    sizes = sizes_of(CASE, Ours(CASE, 1))
    (decode,) = [part for part in parts_of(CASE, sizes, reuses=False) if part.name == "decode"]
    # two tensors of one key head of 32 float32 numbers in each of three layers
    assert sizes.kv_bytes == 2 * 32 * 4 * 3
    prompt_tokens = sum(prompt.num_tokens for prompt in sizes.prompts)
    assert decode.bytes == 4 * (sizes.text_bytes + (prompt_tokens + 6 * 2.5) * sizes.kv_bytes)
    assert decode.thin


def test_a_floor_is_the_longer_of_arithmetic_and_memory() -> None:
    part = Part(phase="update", name="x", passes=1, linear=200.0, attention=30.0, bytes=60.0)
    assert floor_seconds(part, MACHINE) == 2.0 + 3.0
    assert floor_seconds(replace(part, bytes=200.0), MACHINE) == 10.0
    assert floor_seconds(replace(part, thin=True), MACHINE) == 5.0 + 3.0
