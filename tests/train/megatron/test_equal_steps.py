"""Megatron's updates against the torch backend's on the same rows, in one process and split over two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from fovea.train.megatron.sharded_logprobs import ShardedLogprobAndEntropy
from tests.tiny_models import save, tiny
from tests.train.megatron.equal_steps import (
    COMPARED,
    SAVED_AFTER,
    SIZES,
    Case,
    Steps,
    checkpoint_of,
    megatron_policy,
    megatron_steps,
    mixed_pairs,
    resumed_steps,
    run_steps,
    settings_of,
    steps_of_two_ranks,
    torch_steps,
)

DIGITS = 1e-4
SMALL = 1e-5
"""The KL estimates are differences of nearly equal log-probs, of which 4 digits are more than float32 has."""
SIXTEEN_BITS = 0.1
"""Of the mean log-prob, -6, and of losses."""
WEIGHTS = 1e-5
"""A step moves a weight by up to the learning rate, 1e-3."""
GRPO, PPO, DETACHED = "grpo", "ppo", "ppo, detached"
LORA, LORA_ALONE = "grpo, lora", "grpo, lora, no warm-up"
Layout = tuple[str, str, str]
"""Family, algorithm, and what is divided."""
ALONE = [
    *((family, GRPO, "alone") for family in ("qwen3_vl", "qwen2_5_vl", "qwen3_vl_moe")),
    *(("qwen3_vl", algorithm, "alone") for algorithm in (PPO, DETACHED, LORA)),
    ("qwen2_5_vl", LORA_ALONE, "alone"),
]
TENSOR, DATA, PIPELINE = (("qwen3_vl", PPO, divided) for divided in ("tensor", "data", "pipeline"))
DEALT, UNDEALT = (("qwen3_vl_moe", GRPO, divided) for divided in ("experts", "pipeline"))
ADAPTERS = ("qwen3_vl", LORA, "sequence")
DIVIDED = [
    *(TENSOR, DATA, PIPELINE, ("qwen3_vl", PPO, "sequence")),
    *(("qwen2_5_vl", GRPO, divided) for divided in ("sequence", "pipeline")),
    *(DEALT, ("qwen3_vl_moe", GRPO, "experts, layers and tokens"), UNDEALT),
    *(ADAPTERS, ("qwen3_vl", LORA, "pipeline"), ("qwen2_5_vl", LORA_ALONE, "data")),
    *(("qwen3_vl", GRPO, divided) for divided in ("tensor, chunks", "data, chunks")),
]
CHUNKED = [("qwen3_vl", GRPO, "chunks"), ("qwen3_vl", PPO, "chunks")]
FEW_LOGITS = {"logits_mib": 0.01}
"""Those of some eight actions."""
RESUMED = [(DATA, TENSOR), (DEALT, DEALT), (DEALT, UNDEALT)]
"""Layouts, and those whose checkpoints they go on from: from tensor to data parallel, and with experts dealt out from
those that were and from those that were not."""
BACKENDS: dict[str, dict[str, float]] = {
    "alone": {},
    "data": {},
    "tensor": {"tensor_parallel_size": 2},
    "chunks": FEW_LOGITS,
    "data, chunks": FEW_LOGITS,
    "tensor, chunks": {"tensor_parallel_size": 2} | FEW_LOGITS,
    "sequence": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_parallel_size": 2},
    "experts": {"expert_parallel_size": 2},
    "experts, layers and tokens": {"expert_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel": True},
}


Expected = Callable[[str, str], tuple[Path, Steps]]
Divided = tuple[Path, dict[Layout, Steps], list[Steps]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """Folder and steps of the torch backend, computed here with the same version of transformers."""

    @cache
    def of(family: str, algorithm: str) -> tuple[Path, Steps]:
        folder = save(tiny(family, **SIZES), tmp_path_factory.mktemp(family))
        return folder, torch_steps(settings_of(folder, algorithm), tiny(family, **SIZES))

    return of


@pytest.fixture(scope="module")
def divided(expected: Expected, tmp_path_factory: pytest.TempPathFactory) -> Divided:
    """Folder of the checkpoints, steps of two ranks, and those that were resumed."""
    folder = tmp_path_factory.mktemp("divided")
    resumed = [(DIVIDED.index(layout), DIVIDED.index(writer)) for layout, writer in RESUMED]
    steps = steps_of_two_ranks([case_of(layout, expected) for layout in DIVIDED], folder, resumed)
    return folder, dict(zip(DIVIDED, steps, strict=False)), steps[len(DIVIDED) :]


def case_of(layout: Layout, expected: Expected) -> Case:
    family, algorithm, divided = layout
    return family, expected(family, algorithm)[0], BACKENDS[divided], algorithm


@pytest.mark.parametrize("layout", [pytest.param(ALONE[0], marks=pytest.mark.smoke), *ALONE[1:], *CHUNKED])
def test_its_steps_are_those_of_the_torch_backend(layout: Layout, expected: Expected) -> None:
    check_equal(megatron_steps(case_of(layout, expected)), expected(*layout[:2])[1])


@pytest.mark.parametrize("layout", ALONE[:2])
def test_recomputed_layers_give_the_same_steps(layout: Layout, expected: Expected) -> None:
    check_equal(megatron_steps(case_of(layout, expected), recompute="full"), expected(*layout[:2])[1])


def test_no_pass_with_gradients_makes_the_logits_of_its_chunks_twice(expected: Expected) -> None:
    layout, of_two_passes = ("qwen2_5_vl", GRPO, "chunks"), ShardedLogprobAndEntropy.apply

    def without_gradients(*given: Any) -> Any:
        assert not torch.is_grad_enabled()
        return of_two_passes(*given)

    with patch.object(ShardedLogprobAndEntropy, "apply", side_effect=without_gradients) as scored:
        check_equal(megatron_steps(case_of(layout, expected)), expected(*layout[:2])[1])
    assert scored.call_count > 1, "the reference has no gradients"


@pytest.mark.parametrize("layout", ALONE[:2])
def test_it_trains_in_16_bits(layout: Layout, expected: Expected) -> None:
    family, algorithm, _ = layout
    folder, by_torch = expected(family, algorithm)
    with megatron_policy(folder, algorithm, model={"dtype": "bfloat16"}) as policy:
        steps = run_steps(policy, tiny(family, **SIZES), settings_of(folder).algorithm, range(2))
    differences_A = np.subtract(steps.logprobs[0], by_torch.logprobs[0])
    assert np.abs(differences_A).mean() < SIXTEEN_BITS
    assert steps.metrics[0]["loss"] == pytest.approx(by_torch.metrics[0]["loss"], abs=SIXTEEN_BITS)
    assert all(each["grad_norm"] > 0.5 for each in steps.metrics)
    assert all(weight.isfinite().all() for weight in steps.weights.values())


@pytest.mark.parametrize(("recompute", "times"), [("none", 1), ("full", 2)])
def test_layers_are_computed_again_where_set(recompute: str, times: int, expected: Expected) -> None:
    calls: list[object] = []
    folder = expected("qwen3_vl", GRPO)[0]
    with megatron_policy(folder, recompute=recompute) as policy:
        policy._model.module.language_model.decoder.layers[-1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        policy.sft(mixed_pairs(tiny("qwen3_vl", **SIZES)))
    assert len(calls) == times


@pytest.mark.parametrize("layout", DIVIDED)
def test_two_ranks_take_the_same_steps(layout: Layout, expected: Expected, divided: Divided) -> None:
    check_equal(divided[1][layout], expected(*layout[:2])[1])


@pytest.mark.parametrize("number", range(len(RESUMED)))
def test_two_ranks_go_on_from_a_checkpoint(number: int, expected: Expected, divided: Divided) -> None:
    check_equal(divided[2][number], last_of(expected(*RESUMED[number][0][:2])[1]))


@pytest.mark.parametrize("layout", [TENSOR, DATA, PIPELINE, DEALT, ADAPTERS])
def test_one_process_goes_on_from_the_checkpoint_of_two(layout: Layout, expected: Expected, divided: Divided) -> None:
    family, algorithm, _ = layout
    alone = case_of((family, algorithm, "alone"), expected)
    resumed = resumed_steps(alone, checkpoint_of(divided[0], DIVIDED.index(layout)))
    check_equal(resumed, last_of(expected(family, algorithm)[1]))


def last_of(steps: Steps) -> Steps:
    """Those after the checkpoint."""
    later = {name: getattr(steps, name)[SAVED_AFTER:] for name in ("metrics", "logprobs", "values")}
    return replace(steps, **later, warmup_losses=[])


def check_equal(found: Steps, by_torch: Steps) -> None:
    assert found.warmup_losses == pytest.approx(by_torch.warmup_losses, rel=DIGITS)
    for ours, theirs in zip(found.metrics, by_torch.metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=DIGITS, abs=SMALL)
    for ours_A, theirs_A in zip(found.logprobs, by_torch.logprobs, strict=True):
        np.testing.assert_allclose(ours_A, theirs_A, rtol=DIGITS)
    for ours_A, theirs_A in zip(found.values, by_torch.values, strict=True):
        np.testing.assert_allclose(ours_A, theirs_A, rtol=DIGITS, atol=SMALL)
    assert found.weights.keys() == by_torch.weights.keys()
    for name, weight in by_torch.weights.items():
        torch.testing.assert_close(found.weights[name], weight, atol=WEIGHTS, rtol=0, msg=name)


def test_the_steps_changed_what_is_compared(expected: Expected) -> None:
    """An update that did nothing would be equal as well."""
    for family, algorithm, _ in ALONE:
        _, steps = expected(family, algorithm)
        assert len({each["loss"] for each in steps.metrics}) == len(steps.metrics)
        assert all(each["grad_norm"] > 0.5 for each in steps.metrics), "gradients that are clipped"
        assert set(COMPARED) <= set(steps.metrics[0])
        has_values = algorithm in (PPO, DETACHED)
        assert len({values[0] for values in steps.values}) == has_values * len(steps.metrics)
