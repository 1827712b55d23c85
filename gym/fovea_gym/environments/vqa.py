"""Questions about images with short answers: counts, attributes, existence, yes or no, multiple choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fovea_gym.environments.dataset_prompts import plain_answer
from fovea_gym.environments.dataset_tasks import FileTasks
from fovea_gym.graders.base import Grade, shown
from fovea_gym.graders.vqa_claim import claim_of, found_answer, soft_accuracy
from fovea_gym.graders.vqa_words import listed_options, option_letter, options_of, picked_letter, true_letter
from fovea_gym.rows.rows import RowAccess
from fovea_gym.settings.environments import VqaEnvironment
from fovea_gym.types import Message, Score, Task, Turn


class Vqa(FileTasks):
    """The environment `vqa`; see `config.VqaEnvironment`."""

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
        # of multiple choice the letter is checked with the prompt, and is always right
        return bool(task_options(task, self._config)) or is_gradable(true_answers(task, self._config))


class VqaGrader:
    """The grader of `vqa`: the answer in a response against those of the annotators, or the right option."""

    def __init__(self, config: VqaEnvironment) -> None:
        self._config = config

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        options = task_options(task, self._config)
        truths = [true_letter(task.answer, options, task.id)] if options else true_answers(task, self._config)
        graded = grade(turns[-1].text, truths, options=options)
        return Score(reward=graded.score, accuracy=graded.score, parts=graded.parts)

    def overruled(self, score: Score, *, right: bool) -> Score:
        """The score of the same answer, had it been found right, or wrong."""
        return Score(reward=float(right), accuracy=float(right), parts={**score.parts, "answer": float(right)})


def true_answers(task: Task, config: VqaEnvironment) -> list[str]:
    """The answers of all annotators of a row, or its one answer."""
    cell = task.row.get(config.answers_key) if config.answers_key is not None else None
    return answers_of(cell, task.id) if isinstance(cell, list | tuple) and cell else [task.answer]


def task_options(task: Task, config: VqaEnvironment) -> tuple[str, ...]:
    """The options of a row of multiple choice; none for other rows."""
    key = config.choices_key
    return () if key is None else options_of(task.row.get(key), task.id)


def grade(prediction: str, truth: str | Sequence[str], *, options: Sequence[str] = ()) -> Grade:
    """A response against one answer or several annotators (soft accuracy); with `options` the truth is a letter."""
    truths = [truth] if isinstance(truth, str) else list(truth)
    found = found_answer(prediction)
    claim = claim_of(found)
    if options:
        is_picked = option_letter(found) is not None
        read = picked_letter(found, options) or (None if is_picked else picked_letter(claim.phrase, options)) or ""
        accuracy = soft_accuracy(read, truths)
    else:
        accuracy, read = soft_accuracy(found, truths), claim.number or claim.phrase
    expected = shown(truths[0]) if len(set(truths)) == 1 else f"what {len(truths)} annotators say"
    verdict = "is" if accuracy == 1 else "is in part" if accuracy else "is not"
    reason = f"{shown(found)}, read as {shown(read)}, {verdict} {expected}"
    return Grade(score=accuracy, parts={"answer": accuracy}, reason=reason)


def is_gradable(truths: Sequence[str]) -> bool:
    """True if any of the true answers is right, at least in part, when it is boxed word for word; `?` is not."""
    return any(grade(rf"\boxed{{{truth}}}", truths).score > 0 for truth in truths)


def majority_answer(cell: object, where: str) -> str:
    """The answer in a cell; of several annotators' answers the most frequent, and the first in a tie."""
    if isinstance(cell, list | tuple) and cell:
        return Counter(answers_of(cell, where)).most_common(1)[0][0]
    return plain_answer(cell, where)


def answers_of(cell: Sequence[object], where: str) -> list[str]:
    """The answers of all annotators: texts, or mappings as in VQA v2, {answer, answer_id, answer_confidence}."""
    return [plain_answer(one.get("answer") if isinstance(one, Mapping) else one, where) for one in cell]
