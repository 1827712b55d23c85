"""The experiment about importance weights: its engine is as inexact as it says, and its trainer exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.mismatch import main, rounded
from fovea.metrics.log import read_metrics

SHORT = [
    "max_steps=1", "warmup.max_steps=1", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=2",
    "evaluate.every_steps=0", "evaluate.image_controls=false", "evaluate.before_training=false", "threads=1",
    "environment.train_size=64", "environment.dev_size=4", "environment.test_size=4", "parity.prompts=0",
]  # fmt: skip


def test_rounding_keeps_the_largest_of_each_row_and_few_values() -> None:
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    coarse = rounded(weight, 3)
    assert all(len(row.unique()) <= 7 for row in coarse)
    torch.testing.assert_close(coarse.abs().amax(1), weight.abs().amax(1))
    assert (coarse - weight).abs().amax() <= weight.abs().amax() / 3 / 2 + 1e-6
    assert torch.equal(rounded(weight[0], 3), weight[0])


def test_three_runs_of_which_two_draw_from_coarse_weights(tmp_path: Path) -> None:
    main(["recipes/shapes.yaml", "--out", str(tmp_path), "--bits", "3", *SHORT])
    first = {name: read_metrics(tmp_path / name)[0] for name in ("exact", "corrected", "uncorrected")}
    assert first["exact"]["rollout_train_abs"] == pytest.approx(0, abs=1e-5)
    assert first["corrected"]["rollout_train_abs"] > 1e-3
    assert first["uncorrected"]["rollout_train_abs"] > 1e-3
    assert "importance/weight" in first["corrected"]
    assert "importance/weight" not in first["uncorrected"]
