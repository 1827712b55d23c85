"""A finite reward that would drown all others is an error that names its row, whoever gave it."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from fovea.config.environments import CaptionEnvironment
from fovea.config.run import Config
from fovea.environments.caption import CaptionGrader
from fovea.environments.custom.grader import UserGrader, score_function
from fovea.environments.graders.grading import Grading
from fovea.environments.graders.limited_calls import CallLimits, CallThreads, LimitedCalls
from fovea.errors import DataError
from fovea.types import ImageRef, Score
from fovea.wiring.environment import make_environment
from tests.fakes import BanditEnvironment
from tests.grading import score_in_run

TASK = BanditEnvironment().tasks("train")[0]
TOO_LARGE = r"^train/0: the reward of 'an answer' is -?\d.*, beyond 1e\+06; scale it down$"


def unopened(ref: ImageRef) -> Image.Image:
    raise AssertionError(f"{ref} was opened")


def returning(returned: object) -> Grading:
    grader = UserGrader(score_function(lambda task, text, images: returned, unopened), CallThreads("mine.py:f"))
    return Grading(graders=(grader,), calls=LimitedCalls(CallLimits(name="mine.py:f")))


@pytest.mark.parametrize(
    "returned", [1e30, -1e308, {"answer": 2e6}, {"answer": 9e5, "format": 9e5}, Score(reward=1e7, accuracy=1)]
)
def test_a_reward_and_a_sum_of_parts_beyond_the_limit(returned: object) -> None:
    with pytest.raises(DataError, match=TOO_LARGE):
        score_in_run(returning(returned), TASK, "an answer")


def test_a_reward_at_the_limit_is_a_reward() -> None:
    assert score_in_run(returning(-1e6), TASK, "an answer").reward == -1e6


def test_the_limit_holds_for_every_grader(tmp_path: Path) -> None:
    def grading(**settings: object) -> Grading:
        return make_environment(Config.model_validate({"model": {"tiny": {}}, **settings})).grading

    (tmp_path / "mine.py").write_text("def f(task, text, images):\n    return 1e30\n", encoding="utf-8")
    reward = f"{tmp_path / 'mine.py'}:f"
    with pytest.raises(DataError, match=TOO_LARGE):
        score_in_run(grading(reward=reward), TASK, "an answer")


def test_the_score_of_a_reward_model_is_bounded_too() -> None:
    class Loud:
        def score(self, question: str, answer: str, images: object) -> float:
            return 1e30

    settings = CaptionEnvironment.model_validate(
        {"train_files": ["a.jsonl"], "test_files": ["a.jsonl"], "metric_weights": {"reward_model": 1}}
    )
    grading = Grading(graders=(CaptionGrader(settings, lambda split: [], Loud()),))
    with pytest.raises(DataError, match=TOO_LARGE):
        score_in_run(grading, TASK, "an answer")
