"""Controls of a learning curve: random rewards, swapped pictures, and texts that tell the answer."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.controls import SHARE, main, random_geo3k, random_geospot
from benchmarks.told_scenes import ToldScenes
from fovea_gym.types import Task, Turn

PARIS = {"city": "Paris", "region": None, "country": "France", "lat": 48.86, "lon": 2.35}
ANSWER = "City: Paris\nCountry: France\nLatitude: 48.86\nLongitude: 2.35"
GRADED = {
    random_geo3k: (Task(id="0", question="", answer="5", images=(), row={}), "\\boxed{5}", "\\boxed{6}"),
    random_geospot: (Task(id="0", question="", answer="", images=(), row=PARIS), ANSWER, "Country: Spain"),
}


@pytest.mark.parametrize("reward", GRADED)
def test_a_random_reward_is_the_same_for_right_and_wrong_answers(reward: object) -> None:
    task, right, wrong = GRADED[reward]  # type: ignore[index]
    for text, share in ((right, 1), (wrong, 0)):
        scores = [asyncio.run(reward(task, text, ())) for _ in range(400)]  # type: ignore[operator]
        assert {score["accuracy"] for score in scores} == {share}
        assert all(score["true"] == pytest.approx(share) for score in scores)
        # a binomial's deviation is .023
        assert sum(score["reward"] for score in scores) / 400 == pytest.approx(SHARE, abs=0.12)


def test_pictures_are_swapped_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = pa.table({"problem": [str(n) for n in range(20)], "images": [[n] for n in range(20)]})
    pq.write_table(rows, tmp_path / "rows.parquet")
    monkeypatch.setattr(sys, "argv", ["controls", str(tmp_path / "rows.parquet"), str(tmp_path / "swapped.parquet")])
    main()
    swapped = pq.read_table(tmp_path / "swapped.parquet")
    assert swapped["problem"] == rows["problem"]
    assert sorted(swapped["images"].to_pylist()) == rows["images"].to_pylist() != swapped["images"].to_pylist()


ROWS = 40


def test_three_tenths_of_the_questions_tell_their_answer_and_no_answer_is_more_frequent_there() -> None:
    tasks = ToldScenes().tasks("train")[:ROWS]
    assert Counter((task.kind, task.answer) for task in tasks) == {
        **{("told", number): 3 for number in "1234"},
        **{("seen", number): 7 for number in "1234"},
    }
    for task in tasks:
        assert (f"There are {task.answer}." in task.question) == (task.kind == "told")
        assert task.images


def test_its_own_answers_earn_full_marks() -> None:
    scenes = ToldScenes()
    for task in scenes.tasks("dev")[:ROWS]:
        scores = [scenes.score(task, [Turn(messages=(), text=text)]) for text in (scenes.target(task), "5")]
        assert [asyncio.run(score).reward for score in scores] == [1, 0]
