"""A family that the whole suite does not run: its log-probs with the weights of two pushes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fovea.errors import EngineError
from tests.rollout.engine_suite import ask, check_draws_of_two_pushes, prompts_of
from tests.rollout.engines.serving import serving, tiny_for


@pytest.mark.smoke
def test_logprobs_of_qwen2_vl_equal_transformers_after_two_pushes(tmp_path: Path) -> None:
    with serving(tiny_for("qwen2_vl"), tmp_path / "model") as served:
        with pytest.raises(EngineError, match="the engine has no weights; push them first"):
            served.generate(ask("early", prompts_of(served.parts)[0]))
        check_draws_of_two_pushes(served)
