"""Figures of the benchmarks by hand: messages of scaling, overlap, comparison with TRL, least work of a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.cases import CASES, endless, make_parts
from benchmarks.floors import MachineRates, Part, floor_seconds, parts_of, sizes_of
from benchmarks.ours import Ours
from benchmarks.overlap import figures
from benchmarks.scaling import SAMPLES, TOKENS, message
from benchmarks.timing import Speedup, StepTimes, shown_ratio, with_plain_share
from fovea.models.flops import FORWARD, Passes, training_passes
from fovea_tools.probe.rates import Rates


def test_a_message_has_thirteen_bytes_a_token_and_four_more_with_advantages() -> None:
    figures = message(4, 2)
    assert figures["message"] * 2**20 == pytest.approx(4 * SAMPLES * TOKENS * 17, rel=0.05)
    assert figures["images"] == 4 * 1.5


def test_each_side_waits_for_the_other_where_they_take_turns() -> None:
    row = {"seconds/step": 1.0, "seconds/rollout": 0.5, "seconds/update": 0.3, "seconds/weight_sync": 0.1}
    found = figures([row])
    assert (found["policy idle"], found["staleness"]) == (0.5, 0)
    assert found["engine idle"] == pytest.approx(0.4)
    # where they overlap, the waiting is measured and the median taken
    measured = {"seconds/rollout": 0.9, "seconds/update": 0.7, "staleness/mean": 1}
    idle = [{"seconds/idle_update": x, "seconds/idle_rollout": x / 2} for x in (0.1, 0.2, 9.0)]
    found = figures([row | measured | each for each in idle])
    assert (found["policy idle"], found["engine idle"], found["staleness"]) == (0.2, 0.1, 1)


def test_the_three_ratios_by_hand() -> None:
    """The machine halved its speed in the second pair, and disturbed the third of ours only."""
    speedup = Speedup.of(slow=[10, 20, 12], fast=[2, 4, 6])
    assert speedup == Speedup(of_medians=12 / 4, paired=5, of_best=5)


@pytest.mark.parametrize(
    ("ratio", "spreads", "shown"),
    [(4.74, (0.1, 0.2), "4.7x"), (4.74, (0.1, 0.21), "5x"), (12.93, (0.3, 0), "10x"), (0.957, (0, 0), "0.96x")],
)
def test_a_large_spread_takes_the_second_digit(ratio: float, spreads: tuple[float, float], shown: str) -> None:
    assert shown_ratio(ratio, spreads) == shown


def test_one_plain_update_in_fifty_counts() -> None:
    usual = StepTimes(step=7.0, rollout=3.0, train=4.0, tokens=8.0)
    mean = with_plain_share(usual, StepTimes(step=12.0, rollout=3.0, train=9.0, tokens=8.0), every_steps=50)
    assert (mean.step, mean.rollout, mean.train) == pytest.approx((7.1, 3.0, 4.1))


@pytest.mark.parametrize("name", ["tiny", "image_heavy"])
def test_all_ids_of_a_case_can_be_drawn_but_special_ones(name: str) -> None:
    parts = endless(make_parts(CASES[name]))
    vocabulary = parts.network.get_input_embeddings().num_embeddings
    assert vocabulary == len(parts.processor.tokenizer) == (CASES[name].vocabulary or vocabulary)
    assert len(parts.processor.banned_ids) < 20
    assert np.isin(vocabulary - 1, parts.processor.banned_ids) == (name == "tiny")


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
        work, prompts = sizes.work, [(prompt.num_tokens, prompt.images) for prompt in sizes.prompts]
        whole = sum(work.prompt(n, images, way) + 3 * work.completion(5, n, way) for n, images in prompts)
        spared = sum(work.prompt(n, images, once) + 3 * (4 * work.token + 5 * work.action) for n, images in prompts)
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
