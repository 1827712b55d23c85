"""What is said of the user's rows and reward before a run begins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fovea.config.loading import load_config
from fovea.wiring.environment import make_environment
from fovea.wiring.trial_score import remarks_on_answers, remarks_on_shares


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


def test_shares_of_a_part_that_became_larger_are_said_with_their_numbers(tmp_path: Path) -> None:
    rows = [{"problem": str(row), "answer": "1", "images": [f"{row % 3}.png"]} for row in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = {"name": "vqa", "train_files": [str(tmp_path / "rows.jsonl")], "test_share": 0.2, "dev_share": 0.05}
    parts = {"files": {"environment": files}, "scenes": {"environment": {"name": "shapes"}}}
    environment = json.dumps({"name": "mixture", "parts": parts})
    config = load_config([], ["model.tiny={}", f"environment={environment}", "warmup=null"])
    graded = make_environment(config)
    said = list(remarks_on_shares(config, graded))
    graded.grading.close()
    assert [line.partition(", since")[0] for line in said] == [
        "environment.parts.files.environment.test_share=0.2 of 60 rows holds out 20 and leaves 20 to train on",
        "environment.parts.files.environment.dev_share=0.05 of 60 rows holds out 20 and leaves 20 to train on",
    ]
