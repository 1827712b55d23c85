"""Scenes whose text tells the answer of three questions in ten."""

from __future__ import annotations

import asyncio
from collections import Counter

from benchmarks.told_scenes import ToldScenes
from fovea.types import Turn

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
