"""Answers and episodes scored as in a run, from ordinary code."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from fovea_gym.environments.base import Environment, Split
from fovea_gym.graders.base import Grader
from fovea_gym.graders.grading import Grading
from fovea_gym.types import Message, Score, Task, Turn
from fovea_gym.utils.event_loop import wait_for

Result = TypeVar("Result")


def scored(graders: Sequence[Grader], task: Task, text: str, messages: tuple[Message, ...] = ()) -> Score:
    return wait_for(graders[-1].score(task, [Turn(messages=messages, text=text)]))


def check_gold(environment: Environment, graders: Sequence[Grader], split: Split) -> None:
    """The answers that the environment gives earn full marks from the last grader."""
    for task in environment.tasks(split):
        text = environment.target(task)
        score = scored(graders, task, text, tuple(environment.prompt(task)))
        assert (score.reward, score.accuracy) == (1.0, 1.0), (task.id, text)


def score_in_run(grading: Grading, task: Task, text: str) -> Score:
    """The score of an answer in a run, with the limits of its calls."""
    (score,) = wait_for(grading.scores(task, [[Turn(messages=(), text=text)]]))
    return score


def played(environment: Environment, task: Task, answers: Sequence[str], seed: int = 0) -> tuple[list[Message], Score]:
    """The replies to these answers up to the end of the episode, and its score by the session or the last grader."""

    async def episode() -> tuple[list[Message], Score]:
        session = await environment.open(task, seed)
        turns, replies = list[Turn](), list[Message]()
        messages = environment.prompt(task)
        try:
            for answer in answers:
                turns.append(Turn(messages=tuple(messages), text=answer))
                reply = None if len(turns) == environment.max_turns else await session.reply(turns)
                if reply is None:
                    break
                messages = reply
                replies += reply
            grader = session if session.has_score else None
            score = await (grader.score(turns) if grader else environment.graders[-1].score(task, turns))
        finally:
            await session.close()
        assert score is not None
        return replies, score

    return wait_for(episode())


def within_a_second(call: Callable[[], Result]) -> Result:
    """The result of a call that takes less than a second of processor time in one of three tries.

    A grader that blows up is slow every time; a garbage collection of the whole suite's objects is not.
    """
    for _ in range(3):
        start = time.process_time()
        result = call()
        if time.process_time() - start < 1:
            return result
    raise AssertionError("more than a second of processor time, three times in a row")
