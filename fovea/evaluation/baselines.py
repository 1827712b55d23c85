"""Targets that are no model: what a figure is worth is how far it is above theirs."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from fovea.environments.base import Environment
from fovea.errors import DataError
from fovea.evaluation.evaluator import AnsweredRow
from fovea.prompts import PromptSource
from fovea.report.samples import SampledAnswer
from fovea.types import Task, Turn

MAX_MAJORITY_ROWS = 5000
"""Enough to know the most frequent answers; they are drawn from the whole split."""


def majority_answers(environment: Environment, train: Sequence[Task]) -> Callable[[Task], str]:
    """The answer most frequent in training among tasks of the same kind; of all, for a kind that training lacks.

    Rows that cannot be read are passed over. DataError when none can.
    """
    seen: dict[str, Counter[str]] = defaultdict(Counter)
    # drawn, not every so many: the kinds of rows often take turns
    for index in random.Random(0).sample(range(len(train)), min(len(train), MAX_MAJORITY_ROWS)):
        try:
            task = train[index]
        except DataError:
            continue
        seen[task.kind][environment.target(task)] += 1
    overall = sum(seen.values(), Counter[str]())
    if not overall:
        raise DataError(
            "no training row can be read, so that there is no majority answer; leave the target majority out"
        )
    return lambda task: seen.get(task.kind, overall).most_common(1)[0][0]


def fixed_answers(
    environment: Environment, source: PromptSource, size: int | None, say: Callable[[Task], str]
) -> dict[str, AnsweredRow]:
    """What `say` says to each of the first `size` rows, scored as a model's answer would be."""
    found: dict[str, AnsweredRow] = {}
    for index in range(min(size or len(source), len(source))):
        task = source.read(index, lambda index=index: source.tasks[index])  # type: ignore[misc]
        if task is not None:
            answer = _scored(environment, task, say(task))
            found[task.id] = AnsweredRow(id=task.id, index=index, kind=task.kind, answers=(answer,))
    return found


def _scored(environment: Environment, task: Task, text: str) -> SampledAnswer:
    score = environment.score(task, [Turn(messages=tuple(environment.prompt(task)), text=text)])
    return SampledAnswer(
        text=text,
        reward=score.reward,
        accuracy=score.accuracy,
        parts=score.parts,
        image_parts=score.image_parts,
    )
