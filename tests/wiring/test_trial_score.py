"""The trial of the user's reward before a run: its row can be used, and the gold answer has a reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from fovea.cli.main import app
from fovea.config.loading import load_config
from fovea.wiring.environment import make_environment
from fovea.wiring.images import make_opener
from fovea.wiring.trial_score import try_reward
from fovea_gym.errors import ScoreError
from gym_tests.environments.files import row
from gym_tests.grading import score_in_run
from gym_tests.images import png
from gym_tests.tables import table
from tests.tools.importer.runs_of_others import VERL as VERL_RUN

SPLITS = ("train", "dev", "test")
OPENS = "def score(task, text, images):\n    images[0].load()\n    return float(task.answer in text)\n"
VERL = "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return float({})\n"


def remarks(folder: Path, code: str, rows: list[dict[str, Any]], *words: str) -> list[str]:
    (folder / "mine.py").write_text(code, encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    files = [f"environment.{split}_files=['{folder}/rows.parquet']" for split in SPLITS]
    overrides = ["model.tiny={}", "environment.name=geo3k", *files, f"reward={folder}/mine.py:score", *words]
    config = load_config([], overrides)
    graded = make_environment(config)
    try:
        return try_reward(graded, make_opener(config.data, folder))
    finally:
        graded.grading.close()


def rows_after(**first: object) -> list[dict[str, Any]]:
    rows = [{**row("How many?", "3"), **first}, *(row("How many?", str(n)) for n in range(4, 9))]
    return [{**each, "data_source": "made"} for each in rows]


@table(
    "first",
    [
        {"images": [{"bytes": png((9, 9, 9), 32)[:60], "path": None}]},
        {"images": [{"bytes": None, "path": "missing.png"}]},
        {"answer": None},
    ],
)
def test_a_first_row_that_cannot_be_used_is_left_to_the_run(first: dict[str, object], tmp_path_factory: Any) -> None:
    assert remarks(tmp_path_factory.mktemp("rows"), OPENS, rows_after(**first), "data.on_bad_row=skip") == []


def test_a_reward_that_cannot_score_the_gold_answer_is_an_error_or_a_remark(tmp_path: Path) -> None:
    code = "def score(task, text, images):\n    raise KeyError('no')\n"
    with pytest.raises(ScoreError, match="raised KeyError: 'no'"):
        remarks(tmp_path, code, rows_after())
    for policy in ("drop", "drop_completion"):
        (said,) = remarks(tmp_path, code, rows_after(), f"reward_on_failure={policy}")
        assert said.startswith("your reward gives the gold answer no score: train/0: ")


@table(
    ("code", "said"),
    [
        (VERL.format('solution_str == "?"'), "your reward gives the gold answer 0 (train/0: "),
        (VERL.format('2 * (solution_str == "?") - 1'), "your reward gives the gold answer -1 (train/0: "),
        (VERL.format('f"boxed{{{ground_truth}}}" in solution_str'), None),
        (VERL.format('solution_str.endswith(f"</think><answer>{ground_truth}</answer>")'), None),
        (VERL.format("-(ground_truth not in solution_str)"), None),  # 0 is the best
    ],
)
def test_a_gold_answer_without_a_reward_is_told(code: str, said: str | None, tmp_path_factory: Any) -> None:
    found = remarks(tmp_path_factory.mktemp("rows"), code, rows_after())
    assert [each.startswith(str(said)) for each in found] == ([] if said is None else [True])


def test_no_row_that_can_be_used_is_told(tmp_path: Path) -> None:
    rows = [{**row("How many?", "3"), "answer": None} for _ in range(3)]
    rows[0]["answer"] = ""
    (said,) = remarks(tmp_path, OPENS, rows, "data.on_bad_row=skip")
    assert "was not tried" in said


def test_the_first_line_of_a_file_may_be_damaged(tmp_path: Path) -> None:
    """Its cells tell in which column the images are; those of the next row do, too."""
    lines = '{"problem": \n' + '{"problem": "3?", "answer": "3"}\n' * 3
    (tmp_path / "rows.jsonl").write_text(lines, encoding="utf-8")
    files = [f"environment.{split}_files=['{tmp_path}/rows.jsonl']" for split in SPLITS]
    config = load_config([], ["model.tiny={}", "environment.name=geo3k", *files, "data.on_bad_row=skip"])
    assert len(make_environment(config).environment.tasks("train")) == 4


def test_an_imported_recipe_of_verl_rewards_the_gold_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "hiyouga/geometry3k" and extra_info == {"index": 1}
    return {"score": float("boxed{" + ground_truth + "}" in solution_str), "pred": solution_str}
"""
    Path("rewards.py").write_text(code, encoding="utf-8")
    Path("run.sh").write_text(VERL_RUN, encoding="utf-8")
    words = ["import-config", "run.sh", "custom_reward_function.path=rewards.py", "--environment", "geo3k"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.stderr
    Path("recipe.yaml").write_text(done.stdout, encoding="utf-8")
    asked = row("", "")["images"]
    of_row = {"data_source": "hiyouga/geometry3k", "extra_info": {"index": 1}, "images": asked}
    prompt, truth = [{"role": "user", "content": "<image>How many?"}], {"style": "rule", "ground_truth": "5"}
    rows = [{**of_row, "prompt": prompt, "reward_model": truth} for _ in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), "rows.parquet")
    config = load_config([Path("recipe.yaml")], [f"environment.{split}_files=[rows.parquet]" for split in SPLITS])
    assert config.rewards == {"reward": ("rewards.py:compute_score",)}
    graded = make_environment(config)
    assert try_reward(graded, make_opener(config.data, tmp_path)) == []
    task = graded.environment.tasks("train")[0]
    rewards = [score_in_run(graded.grading, task, rf"So \boxed{{{x}}}.").reward for x in (5, 6)]
    assert rewards == [1, 0]
