"""Wrong positions on a model that is nearly certain: their mean difference is within the limit, and the gate fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from fovea.run.context import Run
from fovea.run.parity import read_parity
from fovea.run.parity_faults import usable_prompts
from fovea.run.parity_reading import FLOOR_FRAC, parity_failure
from fovea.train.base import SftExample
from fovea.utils.event_loop import wait_for
from tests.run.parity import ROUNDING, plain_positions
from tests.tiny_models import DENSE_FAMILIES
from tests.wiring.small import run_of

STEPS = 15
"""Enough for a loss near 0.1: most tokens are certain, as in a model that has solved its task."""


def train_on_the_gates_rows(run: Run) -> float:
    """Supervised steps on the first rows, with and without images; the last loss."""
    assert run.warmup is not None
    prompts = usable_prompts(run.sources.train, run.environment, 4, max_seconds=100, say=lambda _: None)
    pairs = [
        SftExample(
            prompt=row.prompt, answer_ids=run.warmup.answer_ids(*run.environment.demonstration(row.task), "a row")
        )
        for _, row in prompts
    ]
    worker = run.policy.worker
    return [worker.sft(pairs)["loss"] for _ in range(STEPS)][-1]


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_positions_of_words_fail_where_the_mean_would_let_them_pass(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmup = {"max_steps": 1, "learning_rate": 3e-3, "lr_warmup_steps": 0}
    run = run_of(tmp_path, model={"tiny": {"family": family}}, rollout={"max_new_tokens": 12}, warmup=warmup)
    assert train_on_the_gates_rows(run) < 0.3
    wait_for(run.weight_sync.push(0))
    sound = wait_for(read_parity(run, 0))
    assert sound.passed
    assert sound.worst.mean_abs < ROUNDING
    plain_positions(monkeypatch)
    wrong = wait_for(read_parity(run, 0))
    assert FLOOR_FRAC["float32"] * wrong.limit < wrong.worst.mean_abs < wrong.limit, "the mean alone lets it pass"
    assert not wrong.passed
    message = parity_failure(wrong)
    assert f"on prompts with images the log-probs of the {wrong.engine} engine and of the trainer differ by" in message
    assert "without images; " in message
    assert "look at the positions of image tokens" in message
