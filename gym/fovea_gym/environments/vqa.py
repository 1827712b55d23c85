"""Questions about images with short answers: counts, attributes, existence, yes or no, multiple choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fovea_gym.environments.dataset_tasks import FileTasks
from fovea_gym.graders.vqa_answer import answers_of, grade, is_gradable, majority_answer
from fovea_gym.graders.vqa_words import listed_options, options_of, true_letter
from fovea_gym.rows.access import RowAccess
from fovea_gym.settings.environments import VqaEnvironment
from fovea_gym.types import Message, Score, Task, Turn


class Vqa(FileTasks):
    """The environment `vqa`, whose settings are `VqaEnvironment`."""

    def __init__(self, config: VqaEnvironment, access: RowAccess) -> None:
        super().__init__(config, access, read_answer=majority_answer, is_gradable=self._is_right)
        self._config = config
        self.graders = (VqaGrader(config),)

    def prompt(self, task: Task) -> Sequence[Message]:
        options = task_options(task, self._config)
        if options:
            true_letter(task.answer, options, task.id)  # a row whose answer is not an option is a bad row
            task = replace(task, question=f"{task.question}\n{listed_options(options)}")
        return super().prompt(task)

    def target(self, task: Task) -> str:
        options = task_options(task, self._config)
        return rf"\boxed{{{true_letter(task.answer, options, task.id) if options else task.answer}}}"

    def _is_right(self, task: Task) -> bool:
        # for multiple choice, `prompt` checks the letter, which the grader always accepts
        return bool(task_options(task, self._config)) or is_gradable(true_answers(task, self._config))


class VqaGrader:
    """The grader of `vqa`, which compares a response with the annotators' answers or with the right option."""

    def __init__(self, config: VqaEnvironment) -> None:
        self._config = config

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        options = task_options(task, self._config)
        truths = [true_letter(task.answer, options, task.id)] if options else true_answers(task, self._config)
        graded = grade(turns[-1].text, truths, options=options)
        return Score(reward=graded.score, accuracy=graded.score, parts=graded.parts)

    def overruled(self, score: Score, *, right: bool) -> Score:
        """The score of the same response if a judge finds its answer right or wrong."""
        return Score(reward=float(right), accuracy=float(right), parts={**score.parts, "answer": float(right)})


def true_answers(task: Task, config: VqaEnvironment) -> list[str]:
    """The answers of all annotators of a row, or its only answer."""
    cell = task.row.get(config.answers_key) if config.answers_key is not None else None
    return answers_of(cell, task.id) if isinstance(cell, list | tuple) and cell else [task.answer]


def task_options(task: Task, config: VqaEnvironment) -> tuple[str, ...]:
    """The options of a multiple-choice row; empty for other rows."""
    key = config.choices_key
    return () if key is None else options_of(task.row.get(key), task.id)
