r"""Geometry problems with a diagram, from Parquet files in one of two public layouts.

In the hub's, `problem` is a text with `<image>` marks and `answer` bare or in `\boxed{...}`; in verl's, `prompt` is a
list of {role, content} and `reward_model` holds `ground_truth`. Of a list of answers any is right. Some diagrams of the
public test split are in the train split too (172 of 601 rows): accuracy on these rows is on new questions, not on new
diagrams.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from fovea_gym.environments.dataset_prompts import plain_answer
from fovea_gym.environments.dataset_tasks import FileTasks, answer_key, prompt_key
from fovea_gym.graders.base import Grade, shown
from fovea_gym.graders.math_answer import last_boxed, last_tagged, same_answer
from fovea_gym.rows.rows import RowAccess
from fovea_gym.settings.environments import Geo3kEnvironment
from fovea_gym.types import AnswerEnd, Score, Task, Turn

FindsAnswer: TypeAlias = Callable[[str], str | None]
"""A function of a response to its final answer; None where it has none in form."""


class Geo3k(FileTasks):
    """The environment `geo3k`; see `config.Geo3kEnvironment`."""

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
    """The grader of `geo3k`: the boxed answer against the truth."""

    def __init__(self, config: Geo3kEnvironment) -> None:
        self._config = config

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        find = last_tagged if self._config.answer_tags else last_boxed
        graded = grade(turns[-1].text, true_answers(task, self._config), find=find, think_tags=self._config.think_tags)
        return Score(reward=self._reward(graded), accuracy=graded.score, parts=graded.parts)

    def overruled(self, score: Score, *, right: bool) -> Score:
        """The score of the same response, had its answer been found right, or wrong; its format counts as before."""
        graded = Grade(score=float(right), parts={**score.parts, "answer": float(right)})
        return Score(reward=self._reward(graded), accuracy=graded.score, parts=graded.parts)

    def _reward(self, graded: Grade) -> float:
        """A weighted mean of answer and format as in verl and EasyR1, or one of two values as in RLinf."""
        bounds = self._config.binary_rewards
        if bounds is not None:
            return bounds[graded.score == 1]
        weight = self._config.weight_of_format
        return (1 - weight) * graded.score + weight * graded.parts["format"]


def gold_answers(cell: object, where: str) -> list[str]:
    """The true answers of a cell: one, or several in a list, also in verl's `ground_truth`."""
    if isinstance(cell, Mapping):
        cell = cell.get("ground_truth")
    several = cell if isinstance(cell, list | tuple) and cell else [cell]
    return [plain_answer(one, where) for one in several]


def true_answers(task: Task, config: Geo3kEnvironment) -> list[str]:
    """All true answers of a task's row, or its one answer."""
    prompt = prompt_key(task.row, config) or ""
    key = answer_key(task.row, prompt, config)
    # a reply that ends the messages is one answer, and some tasks have no row
    return [task.answer] if key == prompt or task.row.get(key) is None else gold_answers(task.row[key], task.id)


def grade(
    prediction: str, truth: str | Sequence[str], *, find: FindsAnswer = last_boxed, think_tags: bool = False
) -> Grade:
    """A response against the true answer, or any of several, by its last closed box.

    `format` is 1 for an answer in form, which with `think_tags` follows `</think>`. The opening tag may be missing:
    many chat templates have written it already.
    """
    truths = [truth] if isinstance(truth, str) else truth
    given = find(prediction)
    accuracy = float(given is not None and any(same_answer(given, one) for one in truths))
    formatted = float(given is not None and (not think_tags or _found_after_thinking(prediction, find)))
    kind, missing = ("boxed", r"\boxed{}") if find is last_boxed else ("tagged", "<answer>")
    if given is None:
        reason = f"no {missing} that closes"
    else:
        reason = f"{kind} {shown(given)} {'equals' if accuracy else 'is not'} {' or '.join(map(shown, truths))}"
    return Grade(score=accuracy, parts={"answer": accuracy, "format": formatted}, reason=reason)


def is_gradable(truths: Sequence[str]) -> bool:
    """True if each true answer is right when it is boxed word for word; `{5` and a bare `$` are not."""
    return all(grade(rf"\boxed{{{truth}}}", truth).score == 1 for truth in truths)


def _found_after_thinking(text: str, find: FindsAnswer) -> bool:
    """True if an answer follows exactly one stretch of reasoning in tags."""
    thought, closing, tail = text.partition("</think>")
    thought = re.sub(r"^\s*<think>", "", thought)
    well_formed = closing and thought.strip() and not re.search("</?think>", thought + tail)
    return bool(well_formed) and find(tail) is not None
