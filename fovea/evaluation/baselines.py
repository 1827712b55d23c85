"""Baselines for `fovea eval` that do not need a model: the majority answer, the gold answer, a constant."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from fovea.data.prompt_source import PromptSource
from fovea.evaluation.evaluator import answered_rows
from fovea.evaluation.records import AnsweredRow
from fovea.types import Episode
from fovea_gym.environments.base import Environment
from fovea_gym.errors import DataError, UnscoredError
from fovea_gym.graders.grading import Grading
from fovea_gym.types import Task, Turn

MAX_MAJORITY_ROWS = 5000
"""Number of training rows sampled to find the most frequent answers, enough for a stable result."""
# tasks may hold the bytes of their images: a whole split might not fit in memory
_ROWS_PER_CHUNK = 256


def majority_answers(environment: Environment, train: Sequence[Task]) -> Callable[[Task], str]:
    """A function that returns the most frequent training answer of a task's kind, or of all kinds for an unseen kind.

    Bad rows are skipped; DataError if all rows are bad.
    """
    seen: dict[str, Counter[str]] = defaultdict(Counter)
    # a random sample instead of every k-th row: data sets often cycle through their kinds
    for index in random.Random(0).sample(range(len(train)), min(len(train), MAX_MAJORITY_ROWS)):
        try:
            task = train[index]
        except DataError:
            continue
        seen[task.kind][environment.target(task)] += 1
    overall = sum(seen.values(), Counter[str]())
    if not overall:
        raise DataError("no training row can be read, so there is no majority answer; leave out the target majority")
    return lambda task: seen.get(task.kind, overall).most_common(1)[0][0]


async def baseline_answers(
    environment: Environment,
    grading: Grading,
    source: PromptSource,
    size: int | None,
    answer_of: Callable[[Task], str],
    *,
    unscored: list[str] | None = None,
) -> list[AnsweredRow]:
    """Score the answers of `answer_of` to the first `size` rows, in the same way as a model's answers.

    A row with an UnscoredError is left out and its reason appended to `unscored`; if None, the error is raised.
    """
    size = min(size or len(source), len(source))
    found: list[AnsweredRow] = []
    for start in range(0, size, _ROWS_PER_CHUNK):
        indices = range(start, min(start + _ROWS_PER_CHUNK, size))
        read = ((index, source.read(index, partial(source.tasks.__getitem__, index))) for index in indices)
        tasks = {index: task for index, task in read if task is not None}
        calls = [asyncio.create_task(_scored(environment, grading, task, answer_of(task))) for task in tasks.values()]
        answered = [await call for call in calls]  # in order, so that the error of the first failing row is raised
        found += answered_rows(source, tasks, answered, unscored=unscored)
    return found


async def _scored(environment: Environment, grading: Grading, task: Task, text: str) -> list[Episode] | UnscoredError:
    turn = Turn(messages=tuple(environment.prompt(task)), text=text)
    try:
        (score,) = await grading.scores(task, [[turn]])
    except UnscoredError as error:
        return error
    return [Episode(task=task, turns=(turn,), score=score)]
