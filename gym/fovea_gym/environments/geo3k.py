r"""Geometry problems with a diagram, from Parquet files in one of two public layouts.

In the hub's, `problem` is a text with `<image>` marks, and `answer` is bare or in `\boxed{...}`; in verl's, `prompt` is
a list of {role, content}, and `reward_model` holds `ground_truth`. If the answer is a list, any of its items is right.
Some diagrams of the public test split are also in the train split (172 of 601 rows): on these rows, accuracy is about
new questions, not new diagrams.
"""

from __future__ import annotations

from collections.abc import Sequence

from fovea_gym.environments.dataset_tasks import FileTasks, answer_key, prompt_key
from fovea_gym.graders.base import Grade
from fovea_gym.graders.boxed_answer import gold_answers, grade, is_gradable
from fovea_gym.graders.math_answer import last_boxed, last_tagged
from fovea_gym.rows.access import RowAccess
from fovea_gym.settings.environments import Geo3kEnvironment
from fovea_gym.types import AnswerEnd, Score, Task, Turn


class Geo3k(FileTasks):
    """The environment `geo3k`, whose settings are `Geo3kEnvironment`."""

    def __init__(self, config: Geo3kEnvironment, access: RowAccess) -> None:
        super().__init__(
            config,
            access,
            read_answer=lambda cell, where: gold_answers(cell, where)[0],
            is_gradable=lambda task: is_gradable(true_answers(task, config)),
        )
        self._config = config
        self.answer_end = AnswerEnd(
            closing="</answer>" if config.answer_tags else "", after="</think>" if config.think_tags else ""
        )
        self.graders = (Geo3kGrader(config),)

    def target(self, task: Task) -> str:
        answer = f"<answer>{task.answer}</answer>" if self._config.answer_tags else rf"\boxed{{{task.answer}}}"
        return f"<think>The answer is {task.answer}.</think>{answer}" if self._config.think_tags else answer


class Geo3kGrader:
    """The grader of `geo3k`, which compares the boxed answer with the true answers."""

    def __init__(self, config: Geo3kEnvironment) -> None:
        self._config = config

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        find = last_tagged if self._config.answer_tags else last_boxed
        graded = grade(turns[-1].text, true_answers(task, self._config), find=find, think_tags=self._config.think_tags)
        return Score(reward=self._reward(graded), accuracy=graded.score, parts=graded.parts)

    def overruled(self, score: Score, *, right: bool) -> Score:
        """The score of the same response if a judge finds its answer right or wrong; its format counts as before."""
        graded = Grade(score=float(right), parts={**score.parts, "answer": float(right)})
        return Score(reward=self._reward(graded), accuracy=graded.score, parts=graded.parts)

    def _reward(self, graded: Grade) -> float:
        """A weighted mean of answer and format as in verl and EasyR1, or one of two values as in RLinf."""
        bounds = self._config.binary_rewards
        if bounds is not None:
            return bounds[graded.score == 1]
        weight = self._config.weight_of_format
        return (1 - weight) * graded.score + weight * graded.parts["format"]


def true_answers(task: Task, config: Geo3kEnvironment) -> list[str]:
    """All true answers in a task's row, or the task's only answer."""
    prompt = prompt_key(task.row, config) or ""
    key = answer_key(task.row, prompt, config)
    # a reply that ends the messages is one answer, and some tasks have no row
    return [task.answer] if key == prompt or task.row.get(key) is None else gold_answers(task.row[key], task.id)
