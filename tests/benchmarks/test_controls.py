"""Controls of a learning curve: rewards that know nothing, and rows with each other's pictures."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.controls import SHARE, main, random_geo3k, random_geospot
from fovea.types import Task

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
