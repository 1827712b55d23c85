"""The engine in the suite of all engines, and log-probs of families that the whole suite does not run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fovea.errors import EngineError
from fovea_gym.utils.event_loop import wait_for
from tests.rollout.engine_suite import (
    TOLERANCE,
    Served,
    ServingSuite,
    ask,
    check_draws,
    check_samples_of_two_syncs,
    prompts_of,
)
from tests.rollout.engines.under_test import served_by, serving, stream, tiny_for
from tests.rollout.two_turns import batch_of, drawn_and_checked, whole_logprobs
from tests.tiny_models import with_deepstack


@pytest.mark.smoke
def test_logprobs_of_qwen2_vl_equal_transformers_after_two_weight_syncs(tmp_path: Path) -> None:
    with serving(tiny_for("qwen2_vl"), tmp_path / "model") as served:
        with pytest.raises(EngineError, match="the engine has no weights; run a weight sync first"):
            served.generate(ask("early", prompts_of(served.parts)[0]))
        check_samples_of_two_syncs(served)


@torch.no_grad()
def test_logprobs_of_experts_equal_transformers_after_weight_syncs_of_all_and_of_a_layer(tmp_path: Path) -> None:
    # as many levels of vision features as in the hub's models, which SGLang takes for granted
    parts = with_deepstack(tiny_for("qwen3_vl_moe", vision_depth=4), [0, 1, 2])
    with serving(parts, tmp_path / "model") as served:
        syncs = stream(served.engine, parts)
        for version in (1, 2):
            wait_for(syncs.sync(version))
            check_draws(served, version)
            for name, weight in parts.network.named_parameters():
                weight.requires_grad_(".layers.1.mlp.experts." in name)
                weight.add_(torch.randn_like(weight) * 0.02 * weight.requires_grad)


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def served(request: pytest.FixtureRequest, shared: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with ExitStack() as stack:
        if request.param == "qwen3_vl":
            made = served_by(shared, tiny_for("qwen3_vl", num_kv_heads=2))
        else:
            made = stack.enter_context(serving(tiny_for(request.param), tmp_path_factory.mktemp("suite") / "model"))
        made.sync(7)
        yield made


class TestEngine(ServingSuite):
    def test_ten_turns_with_an_image_each(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        batch = batch_of(drawn_and_checked(served.parts, served.engine, monkeypatch))
        with torch.no_grad():
            expected = whole_logprobs(served.parts, batch)
        for sample, reference in zip(batch.samples, expected, strict=True):
            np.testing.assert_allclose(sample.rollout_logprobs_T[sample.mask_T], reference, atol=TOLERANCE)
