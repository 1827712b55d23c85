"""The engine in the suite of all engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from tests.rollout.engine_suite import TOLERANCE, Served, ServingSuite
from tests.rollout.engines.serving import served_by, serving, tiny_for
from tests.rollout.two_turns import batch_of, drawn_and_checked, whole_logprobs


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
