"""The environment `vqa` in a run, and on the real rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from fovea.config.loading import load_config
from fovea.config.run import Config
from fovea.loop import train
from fovea.wiring.environment import make_environment
from fovea.wiring.run import build
from fovea_gym.rows.tasks import kinds_of
from gym_tests.environments.files import COLOURS, files, row
from gym_tests.grading import scored

SHARED = Path(__file__).parents[3] / "shared" / "data" / "vqa"
RECIPE = Path(__file__).parents[2] / "recipes" / "vqa.yaml"
ROWS = [
    question
    for colour in COLOURS
    for question in (
        row("What colour is the square?", colour, colour, question_type="attribute"),
        row("How many squares are there?", "1", colour, question_type="counting"),
        row("Is there a red square?", "yes" if colour == "red" else "no", colour, question_type="existence"),
        row('True? "It is blue."', "yes" if colour == "blue" else "no", colour, question_type="statement"),
    )
]


def test_the_recipe_runs_on_rows_of_this_test(tmp_path: Path) -> None:
    path = files(tmp_path, ROWS)["train_files"][0]  # type: ignore[index]
    small = ["model.path=null", "model.tiny={}", "model.dtype=float32", "train.gradient_checkpointing=none"]
    small += ["max_steps=2", "rollout.prompts_per_step=3", "rollout.samples_per_prompt=2", "rollout.max_new_tokens=4"]
    small += [
        f"run_dir={tmp_path / 'run'}",
        "log={progress: false, tensorboard: false}",
        "evaluate.image_controls=false",
    ]
    rows = [f"environment.train_files=[{path}]", f"environment.test_files=[{path}]"]
    summary = train(build(load_config([RECIPE], [*small, *rows])))
    assert set(summary.final.accuracies) == {"attribute", "counting", "existence", "statement"}
    assert summary.steps == 2


@pytest.mark.parametrize(("name", "num_rows"), [("fixture_train", 96), ("fixture_test", 48), ("nlvr_vqa_train", 3956)])
def test_gold_answers_of_the_real_rows_score_full_marks(name: str, num_rows: int) -> None:
    file = SHARED / f"{name}.parquet"
    if not file.exists():
        pytest.skip(f"the shared VQA rows are not here ({SHARED})")
    settings = {"name": "vqa", "train_files": [str(file)], "test_files": [str(file)], "dev_share": 0}
    settings |= {"kind_key": "question_type"}
    made = make_environment(Config.model_validate({"model": {"tiny": {}}, "environment": settings}))
    environment, tasks = made.environment, made.environment.tasks("train")
    assert len(tasks) == num_rows
    assert set(kinds_of(tasks)) == {"attribute", "counting", "existence", "statement"}
    for task in tasks:
        for text in (environment.target(task), task.answer, f"The answer is {task.answer}."):
            assert scored(made.grading.graders, task, text).reward == 1.0, (task.id, text)
