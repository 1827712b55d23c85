"""Single answers scored by a grader, from ordinary code."""

from __future__ import annotations

from collections.abc import Sequence

from fovea.environments.graders.base import Grader
from fovea.environments.graders.grading import Grading
from fovea.types import Message, Score, Task, Turn
from fovea.utils.event_loop import wait_for


def scored(graders: Sequence[Grader], task: Task, text: str, messages: tuple[Message, ...] = ()) -> Score:
    """The score of an answer by the last of these graders, the one for held-out rows."""
    return wait_for(graders[-1].score(task, [Turn(messages=messages, text=text)]))


def score_in_run(grading: Grading, task: Task, text: str) -> Score:
    """The score of an answer in a run, with the limits of its calls."""
    (score,) = wait_for(grading.scores(task, [[Turn(messages=(), text=text)]]))
    return score
