"""A family that the whole suite does not run: its log-probs with the weights of two pushes."""

from __future__ import annotations

from pathlib import Path

from tests.rollout.engine_suite import check_draws_of_two_pushes
from tests.rollout.vllm.serving import serving


def test_logprobs_of_qwen2_vl_equal_transformers_after_two_pushes(tmp_path: Path) -> None:
    with serving("qwen2_vl", tmp_path / "model") as served:
        check_draws_of_two_pushes(served)
