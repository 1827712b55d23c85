"""Rows and graders for other trainers: TRL, verl and EasyR1.

`to_dataset` writes the columns that TRL and verl read; `as_trl`, `as_verl` and `as_easyr1` turn a grader into the
reward function that the trainer calls. Given an environment in place of a grader, they find the task of a completion by
the column `extra_info` of `to_dataset`, so that graders that need more than the true answer get the whole row.
"""

from __future__ import annotations

import difflib
import inspect
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from fovea_gym.environments.base import Environment, Split
from fovea_gym.environments.custom.environment import user_graders
from fovea_gym.environments.custom.signatures import NOT_COLUMNS, OF_THE_TRAINER, as_easyr1_result, as_verl_result
from fovea_gym.environments.dataset_prompts import IMAGE_MARK, texts_of
from fovea_gym.environments.stages import Stages
from fovea_gym.errors import ConfigError, DataError, MissingExtraError
from fovea_gym.graders.base import Grader
from fovea_gym.graders.by_name import Gradable, check_grader, grader_of
from fovea_gym.graders.grading import Grading, UnlimitedCalls
from fovea_gym.rows.images import OpenImage
from fovea_gym.rows.opening import default_opener
from fovea_gym.types import ImageRef, Message, Score, Task, Turn
from fovea_gym.utils.event_loop import gather_or_cancel, wait_for
from fovea_gym.utils.installing import pip_install

Form: TypeAlias = Literal["trl", "verl"]
"""The form of prompts: the content of a message is a list of parts (TRL), or a text with `<image>` marks (verl)."""
Graded: TypeAlias = Gradable | Grader | Environment
"""The name of a grader, such as `geo3k`, a grader, or an environment with graders."""


def to_dataset(
    environment: Environment,
    split: Split = "train",
    *,
    form: Form = "trl",
    rows: int | None = None,
    open_image: OpenImage | None = None,
) -> Any:
    """The rows of a split as a `datasets.Dataset` in memory, the first `rows` of them if that is set.

    Columns: `prompt` (messages), `images` (PNG, in the order of the prompt), `answer`, `data_source`, `reward_model`
    (`style`, `ground_truth`) and `extra_info` (`split`, `index`, `id`, `kind`, `question`). DataError for a row that
    cannot be read; MissingExtraError without the package datasets.
    """
    try:
        from fovea_gym.rows.readers.hub import dataset_of
    except ModuleNotFoundError as error:
        if error.name != "datasets":
            raise
        problem = "to_dataset makes a Hugging Face data set, and the package datasets is not installed"
        raise MissingExtraError(f"{problem}; {pip_install('hub')}") from error
    if form not in get_args(Form):
        near = difflib.get_close_matches(str(form), get_args(Form), n=1)
        fix = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(get_args(Form))}"
        raise ConfigError(f"form={form} is not a form of prompts; {fix}")
    tasks = environment.tasks(split)
    indices = range(len(tasks) if rows is None else min(rows, len(tasks)))
    opener = open_image or default_opener()
    return dataset_of(_row(environment, tasks[index], split, index, form, opener) for index in indices)


def _row(
    environment: Environment, task: Task, split: Split, index: int, form: Form, open_image: OpenImage
) -> dict[str, object]:
    messages = environment.prompt(task)
    images = [part for message in messages for part in message.parts if isinstance(part, ImageRef)]
    write = _message_of_parts if form == "trl" else _message_of_text
    return {
        "prompt": [write(message) for message in messages],
        "images": [_png(open_image(image)) for image in images],
        "answer": task.answer,
        "data_source": type(environment).__name__,
        "reward_model": {"style": "rule", "ground_truth": task.answer},
        "extra_info": {
            "split": split,
            "index": index,
            "id": task.id,
            "kind": task.kind,
            "question": task.question,
        },
    }


def _message_of_parts(message: Message) -> dict[str, object]:
    texts = [part if isinstance(part, str) else None for part in message.parts]
    return {
        "role": message.role,
        "content": [{"type": "image" if text is None else "text", "text": text} for text in texts],
    }


def _message_of_text(message: Message) -> dict[str, object]:
    return {
        "role": message.role,
        "content": "".join(part if isinstance(part, str) else IMAGE_MARK for part in message.parts),
    }


def _png(image: Any) -> dict[str, object]:
    written = io.BytesIO()
    image.save(written, "PNG")
    return {"bytes": written.getvalue(), "path": None}


def as_trl(given: Graded, *, answer_key: str = "answer") -> Callable[..., list[float]]:
    """A function for `reward_funcs` of TRL's trainers; `answer_key` is the column of the true answer.

    Given an environment, the function finds the rows by the column `extra_info` instead.
    """
    scorer = _Scorer(given)

    def reward(completions: Sequence[object], **columns: Any) -> list[float]:
        key = answer_key if scorer.environment is None else "extra_info"
        if key not in columns:
            fix = "name it by answer_key" if scorer.environment is None else "make the rows by to_dataset"
            raise DataError(f"the rows have no column {key}, by which completions are graded; {fix}")
        cells = {name: each for name, each in columns.items() if name not in (*NOT_COLUMNS, *OF_THE_TRAINER, "prompts")}
        rows = [{name: each[place] for name, each in cells.items()} for place in range(len(completions))]
        tasks = [scorer.task(row.get(answer_key), row.get("extra_info"), row) for row in rows]
        return [score.reward for score in scorer.scores(tasks, [_text_of(each) for each in completions])]

    reward.__name__ = scorer.name  # TRL logs the reward under this name
    return reward


def as_verl(given: Graded) -> Callable[..., dict[str, float]]:
    """A function `compute_score` for verl; it returns the reward as `score`, with `acc` and the parts of the score."""
    scorer = _Scorer(given)

    def compute_score(
        data_source: str, solution_str: str, ground_truth: object, extra_info: object = None, **_: object
    ) -> dict[str, float]:
        task = scorer.task(ground_truth, extra_info, extra_info if isinstance(extra_info, Mapping) else {})
        return as_verl_result(scorer.scores([task], [solution_str])[0])

    return compute_score


def as_easyr1(given: Gradable | Grader) -> Callable[[list[dict[str, Any]]], list[dict[str, float]]]:
    """A batch `compute_score` for EasyR1; it returns `overall` (the reward), `accuracy` and the parts of the score."""
    scorer = _Scorer(given)
    if scorer.environment is not None:
        raise ConfigError(
            f"{scorer.name} is an environment, but EasyR1 passes only the true answer to a reward, so the row cannot "
            "be found; give a grader or its name, such as geo3k"
        )

    def compute_score(reward_inputs: list[dict[str, Any]]) -> list[dict[str, float]]:
        tasks = [scorer.task(each["ground_truth"], None, {}) for each in reward_inputs]
        scores = scorer.scores(tasks, [each["response"] for each in reward_inputs])
        return [as_easyr1_result(score) for score in scores]

    return compute_score


class _Scorer:
    """Scores single-turn answers from synchronous code."""

    def __init__(self, given: Graded) -> None:
        grader: Any = _GraderByName(given) if isinstance(given, str) else given
        self.name = given if isinstance(given, str) else type(given).__name__
        self.environment: Any = grader if hasattr(grader, "tasks") else None
        graders = (grader,)
        if self.environment is not None:
            if not hasattr(grader, "graders") and not hasattr(grader, "score"):
                raise ConfigError(f"{self.name} has no grader; give a grader or its name, such as vqa, in its place")
            graders = tuple(getattr(grader, "graders", None) or user_graders(grader, Stages(), f"{self.name}.score"))
        elif isinstance(grader, type) or not inspect.iscoroutinefunction(getattr(grader, "score", None)):
            what = f"the class {grader.__name__}" if isinstance(grader, type) else f"an object of type {self.name}"
            raise ConfigError(
                f"{what} is not a grader; give the name of one, such as geo3k, an environment, or an object with "
                "async def score(self, task, turns)"
            )
        self._grading = Grading(graders=graders, calls=UnlimitedCalls(self.name))
        self._tasks: dict[Split, Sequence[Task]] = {}

    def task(self, truth: object, place: object, row: Mapping[str, object]) -> Task:
        """The environment's task at `place`, its `extra_info`; without one, a task of the true answer and the row."""
        if self.environment is None:
            texts = truth if isinstance(truth, list | tuple) and truth else [truth]
            return Task(id="row", question="", answer=str(texts[0]), row={"answer": truth, **row, "truth": truth})
        match place:
            case {"split": "train" | "dev" | "test" as split, "index": int() as index}:
                if split not in self._tasks:
                    self._tasks[split] = self.environment.tasks(split)
                return self._tasks[split][index]
        raise DataError(f"extra_info is {place!r:.60}, without split and index; make the rows by to_dataset")

    def scores(self, tasks: Sequence[Task], texts: Sequence[str]) -> list[Score]:
        """The scores of these answers, computed concurrently where a grader waits."""
        turns = [(Turn(messages=(), text=text),) for text in texts]

        async def score(task: Task, answer: Sequence[Turn]) -> Score:
            return (await self._grading.scores(task, [answer]))[0]

        return wait_for(gather_or_cancel([score(*each) for each in zip(tasks, turns, strict=True)]))


class _GraderByName:
    """The grader of a file of answers (`fovea_gym grade`): its score is the reward."""

    def __init__(self, name: Gradable) -> None:
        single = [each for each in get_args(Gradable) if each != "caption"]
        if name == "caption":
            raise ConfigError(f"{name} does not grade single answers; name {', '.join(single)}, or give an environment")
        check_grader(name, single)
        self._grade = grader_of(name, ())

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        graded = self._grade(turns[-1].text, task.row, task.id)
        return Score(reward=graded.score, accuracy=graded.score, parts=graded.parts)


def _text_of(completion: object) -> str:
    """The text of a completion from TRL, which is a text or a list of messages that ends with the answer."""
    if isinstance(completion, str):
        return completion
    messages = completion if isinstance(completion, Sequence) else ()
    return texts_of(list(messages)[-1:], "completion")[0][1] if messages else ""
