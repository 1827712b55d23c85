"""What is said of the user's rows and reward before a run begins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fovea.build.environment import make_environment
from fovea.build.trial_score import remarks_on_answers
from fovea.config.loading import load_config


@pytest.mark.parametrize(
    ("row", "settings", "is_said"),
    [
        ({"question": "?", "solution": "4"}, (), True),  # TRL's name
        ({"question": "?", "solution": "4"}, ("environment.answer_key=solution",), False),
        ({"question": "?", "answer": "4"}, (), False),
        ({"question": "?", "answer": {"lat": 1.0}}, (), False),  # for the reward to find in the row
    ],
)
def test_a_reward_whose_rows_have_no_answers_is_told_so(
    row: dict[str, object], settings: tuple[str, ...], is_said: bool, tmp_path: Path
) -> None:
    """`task.answer in text` would be right for every text."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    files = [f"environment.{split}_files=[{tmp_path / 'rows.jsonl'}]" for split in ("train", "test")]
    own = tmp_path / "own.py"
    own.write_text("def right(task, text, images):\n    return float(task.answer in text)\n")
    config = load_config([], ["model.tiny={}", "environment.name=rows", *files, f"reward={own}:right", *settings])
    graded = make_environment(config)
    said = list(remarks_on_answers(graded))
    graded.grading.close()
    assert len(said) == is_said
    if is_said:
        assert (
            "no column of the training rows is called answer or reward_model, so that task.answer is an empty"
            in said[0]
        )
        assert "the columns are question, solution" in said[0]
