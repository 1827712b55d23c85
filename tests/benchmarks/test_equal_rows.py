"""What `benchmarks.equal_rows` counts."""

from __future__ import annotations

import pytest

from benchmarks.equal_rows import Rows, main, rows_of


def test_equal_beginnings_are_counted_once() -> None:
    """Fed: 1; 1, 2; 1, 2; 1, 3 behind the prompt, of which 1 and 1 2 repeat."""
    found = rows_of([[1, 9], [1, 2, 9], [1, 2, 9], [1, 3, 9], [9]])
    assert found == Rows(completions=5, unequal=4, rows=7, prefixes=3)
    assert found + rows_of([[4, 5]]) == Rows(completions=6, unequal=5, rows=8, prefixes=4)


def test_a_run_is_counted_step_by_step(capsys: pytest.CaptureFixture[str]) -> None:
    short = [
        "max_steps=2", "warmup.max_steps=2", "rollout.prompts_per_step=3", "rollout.samples_per_prompt=2", "threads=1",
        "environment.train_size=32", "environment.dev_size=8", "environment.test_size=8", "parity.prompts=0",
        "evaluate.image_controls=false", "log.tensorboard=false",
    ]  # fmt: skip
    main(["recipes/shapes.yaml", *short])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    counts = [int(words[7].replace(",", "")) for words in lines if words[:1] == ["│"] and words[2:3] == ["to"]]
    assert counts == [6, 6], lines
