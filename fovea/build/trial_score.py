"""A trial call of the user's own reward, before anything large is loaded."""

from __future__ import annotations

from contextlib import suppress

from fovea.build.environment import GradedEnvironment
from fovea.environments.custom.grader import UserGrader
from fovea.errors import DataError, UnscoredError
from fovea.types import Task, Turn
from fovea.utils.event_loop import wait_for

MAX_ROWS_TRIED = 10
"""Training rows in which one is sought that can be read; the run itself reports the bad ones."""


def try_reward(graded: GradedEnvironment) -> None:
    """Let the user's code score the right answer of a training row; ScoreError where it cannot.

    Episodes of several turns are left to the run, as their course depends on the model. What the settings tolerate
    (`reward_on_failure: drop`) is left to it, too.
    """
    try:
        for each in (*graded.parts.values(), graded):
            _try(each)
    except BaseException:
        graded.grading.close()
        raise


def _try(graded: GradedEnvironment) -> None:
    environment, grading = graded.environment, graded.grading
    if environment.max_turns > 1 or not isinstance(grading.graders[-1], UserGrader):
        return
    found = _answered_row(graded)
    if found is None:
        return
    task, answer = found
    with suppress(UnscoredError):
        wait_for(grading.scores(task, [[Turn(messages=tuple(environment.prompt(task)), text=answer)]]))


def _answered_row(graded: GradedEnvironment) -> tuple[Task, str] | None:
    tasks = graded.environment.tasks("train")
    for index in range(min(len(tasks), MAX_ROWS_TRIED)):
        try:
            return tasks[index], graded.environment.target(tasks[index])
        except DataError:
            continue
    return None
