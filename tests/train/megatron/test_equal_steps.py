"""Megatron's updates against the torch backend's on the same rows, in one process and split over two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny_models import save, tiny
from tests.train.megatron.equal_steps import (
    COMPARED,
    SAVED_AFTER,
    SIZES,
    Steps,
    checkpoint_of,
    megatron_steps,
    resumed_steps,
    settings_of,
    steps_of_two_ranks,
    torch_steps,
)

DIGITS = 1e-4
SMALL = 1e-5
"""The KL estimates are differences of nearly equal log-probs, of which 4 digits are more than float32 has."""
WEIGHTS = 1e-5
"""A step moves a weight by up to the learning rate, 1e-3."""
ALONE = [("qwen3_vl", "alone"), ("qwen2_5_vl", "alone")]
DIVIDED = [
    ("qwen3_vl", "tensor"),
    ("qwen3_vl", "data"),
    ("qwen3_vl", "pipeline"),
    ("qwen2_5_vl", "tensor"),
]
BACKENDS: dict[str, dict[str, int]] = {
    "alone": {},
    "data": {},
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
}


Divided = tuple[Path, dict[tuple[str, str], Steps], Steps]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Steps]]:
    """Folder and steps of the torch backend by family, computed here with the same version of transformers."""
    made = {}
    for family in ("qwen2_5_vl", "qwen3_vl"):
        folder = save(tiny(family, **SIZES), tmp_path_factory.mktemp(family))
        made[family] = folder, torch_steps(settings_of(folder), tiny(family, **SIZES))
    return made


@pytest.fixture(scope="module")
def divided(expected: dict[str, tuple[Path, Steps]], tmp_path_factory: pytest.TempPathFactory) -> Divided:
    """Folder of the checkpoints and steps of two ranks by family and layout, and those that were resumed."""
    cases = [(family, expected[family][0], BACKENDS[layout]) for family, layout in DIVIDED]
    folder = tmp_path_factory.mktemp("divided")
    *steps, resumed = steps_of_two_ranks(cases, folder)
    return folder, dict(zip(DIVIDED, steps, strict=True)), resumed


@pytest.mark.parametrize(("family", "layout"), ALONE)
def test_five_steps_are_those_of_the_torch_backend(
    family: str, layout: str, expected: dict[str, tuple[Path, Steps]]
) -> None:
    folder, by_torch = expected[family]
    check_equal(megatron_steps((family, folder, BACKENDS[layout])), by_torch)


@pytest.mark.parametrize(("family", "layout"), DIVIDED)
def test_two_ranks_take_the_same_steps(
    family: str, layout: str, expected: dict[str, tuple[Path, Steps]], divided: Divided
) -> None:
    check_equal(divided[1][family, layout], expected[family][1])


def test_two_ranks_go_on_from_a_checkpoint_of_another_layout(
    expected: dict[str, tuple[Path, Steps]], divided: Divided
) -> None:
    """From tensor parallel to data parallel."""
    check_equal(divided[2], last_of(expected["qwen3_vl"][1]))


@pytest.mark.parametrize(("family", "layout"), DIVIDED)
def test_one_process_goes_on_from_the_checkpoint_of_two(
    family: str, layout: str, expected: dict[str, tuple[Path, Steps]], divided: Divided
) -> None:
    folder, by_torch = expected[family]
    checkpoint = checkpoint_of(divided[0], DIVIDED.index((family, layout)))
    check_equal(resumed_steps((family, folder, BACKENDS["alone"]), checkpoint), last_of(by_torch))


def last_of(steps: Steps) -> Steps:
    """Those after the checkpoint."""
    return replace(steps, metrics=steps.metrics[SAVED_AFTER:], logprobs=steps.logprobs[SAVED_AFTER:], warmup_losses=[])


def check_equal(found: Steps, by_torch: Steps) -> None:
    assert found.warmup_losses == pytest.approx(by_torch.warmup_losses, rel=DIGITS)
    for ours, theirs in zip(found.metrics, by_torch.metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=DIGITS, abs=SMALL)
    for ours_A, theirs_A in zip(found.logprobs, by_torch.logprobs, strict=True):
        np.testing.assert_allclose(ours_A, theirs_A, rtol=DIGITS)
    assert found.weights.keys() == by_torch.weights.keys()
    for name, weight in by_torch.weights.items():
        torch.testing.assert_close(found.weights[name], weight, atol=WEIGHTS, rtol=0, msg=name)


def test_the_steps_changed_what_is_compared(expected: dict[str, tuple[Path, Steps]]) -> None:
    """An update that did nothing would be equal as well."""
    for _, steps in expected.values():
        assert len({each["loss"] for each in steps.metrics}) == len(steps.metrics)
        assert all(each["grad_norm"] > 0.5 for each in steps.metrics), "gradients that are clipped"
        assert set(COMPARED) == set(steps.metrics[0])
