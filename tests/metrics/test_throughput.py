"""Rates by hand, and the arithmetic of an update as torch counts it."""

from __future__ import annotations

import numpy as np
import pytest
from torch.utils.flop_counter import FlopCounterMode

from fovea.config.algorithm import Algorithm
from fovea.config.sections import Log
from fovea.metrics.progress import Progress
from fovea.metrics.throughput import known_peak_tflops, rates
from fovea.models.tiny import TinyParts
from fovea.train.base import ModelFacts
from fovea.types import Batch, Group, SampleGroup
from fovea.wiring.outputs import peak_tflops
from fovea_gym.types import Score, Task
from gym_tests.tables import table
from tests.flops import NOT_COUNTED_BY_TORCH
from tests.policies import make_policy
from tests.records import completion_of, one_turn, sample_of, text_prompt
from tests.tiny_models import image, renderer, tiny, user

ONE_TERATION = 1e12
FEW_PER_CENT = 0.05


def group(*lengths: int) -> Group:
    episodes = [
        one_turn(
            Task(id="t", question="q", answer="a"),
            completion_of(range(n)),
            Score(reward=0, accuracy=0),
        )
        for n in lengths
    ]
    return Group(prompt=text_prompt([0]), episodes=tuple(episodes))


def test_rates_by_hand_of_what_is_known() -> None:
    seconds = {"seconds/step": 4.0, "seconds/update": 2.0}
    groups = [group(5, 7), group(4)]
    expected = {"samples_per_second": 3 / 4, "tokens_per_second": 16 / 4}
    assert rates(groups, seconds, peak_tflops=200) == expected
    expected["tflops_per_second"] = 50
    assert rates(groups, seconds | {"update_tflop": 100.0}, peak_tflops=None) == expected
    assert rates(groups, seconds | {"update_tflop": 100.0}, peak_tflops=200) == expected | {"mfu": 0.25}


@table(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A10G", None),
        ("Tesla T4", None),
        ("", None),
    ],
)
def test_a_device_is_known_by_the_words_of_its_name(name: str, tflops: float | None) -> None:
    assert known_peak_tflops(name) == tflops


def facts(device: str, device_name: str | None, num_workers: int = 1) -> ModelFacts:
    return ModelFacts(device=device, device_name=device_name, parameters=(), num_workers=num_workers)


def test_the_peak_is_the_setting_or_the_data_sheet() -> None:
    said = list[str]()
    progress = Progress(1, 0, enabled=False)
    progress.print = lambda line: said.append(str(line))  # type: ignore[method-assign]
    assert peak_tflops(Log(), facts("cpu", None), progress) is None
    assert peak_tflops(Log(peak_tflops=3), facts("cpu", None), progress) == 3
    assert peak_tflops(Log(peak_tflops=3), facts("cuda", "NVIDIA H200"), progress) == 3
    assert peak_tflops(Log(peak_tflops=3), facts("cuda", "NVIDIA H200", num_workers=8), progress) == 24
    assert not said
    for name, peak, line in (
        ("NVIDIA H200", 8 * 989.5, "mfu: a share of 989.5 TFLOP/s, dense bfloat16 by the data sheet of NVIDIA H200"),
        ("New", None, "mfu: not reported, the peak of New is not known; set log.peak_tflops (dense bfloat16)"),
    ):
        assert peak_tflops(Log(), facts("cuda", name, num_workers=8), progress) == peak
        assert said[-1] == line


def batch_of(parts: TinyParts, lengths: tuple[int, ...]) -> Batch:
    """One group: an image of 48 x 48 px, and completions of these lengths."""
    prompt = renderer(parts).prompt(user(image(1), "How many circles?"))
    rng = np.random.default_rng(0)
    samples = (
        sample_of(
            rng.integers(0, 250, n),
            rollout_logprobs_T=np.full(n, -5, dtype=np.float32),
            reward=1.0,
            weight=1 / sum(lengths),
            advantages_T=np.ones(n, dtype=np.float32),
        )
        for n in lengths
    )
    return Batch(groups=(SampleGroup(prompt=prompt, samples=tuple(samples)),))


@pytest.mark.parametrize(("family", "epochs"), [("qwen2_5_vl", 1), ("qwen3_vl", 1), ("qwen3_vl", 2)])
def test_the_arithmetic_of_an_update_is_what_torch_counts(family: str, epochs: int) -> None:
    """Of a model whose matrices outweigh its attention: torch counts masked pairs, and the last layer drops tokens."""
    text = {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 512}
    parts = tiny(family, **text, num_layers=8, vision_hidden_size=128, vision_depth=6, vision_heads=4)
    policy = make_policy(parts, algorithm=Algorithm(ppo_epochs=epochs))
    batch = batch_of(parts, (30, 24, 36))
    with FlopCounterMode(display=False, custom_mapping=NOT_COUNTED_BY_TORCH) as counter:
        counted = policy.update(batch)["update_tflop"] * ONE_TERATION
    by_torch = counter.get_total_flops()
    assert counted == pytest.approx(by_torch, rel=FEW_PER_CENT)
    vision = 3 * epochs * policy.vlm.family.work.image(batch.groups[0].prompt.images[0])
    assert vision > 2 * FEW_PER_CENT * by_torch, "leaving the images out would show"
