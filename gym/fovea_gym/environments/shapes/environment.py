"""Questions about rendered scenes: counts, colours, shapes and existence; about two scenes; about scenes in words.

Rows are rendered on demand, as a function of (seed, split, index). The hash of a row's pixels (of its text, if it has
no image) decides its split, so that no image, no image of a pair and no text is in two splits. Dev and test do not
depend on the seed: they are the same in every run. Kinds, levels and answers alternate, so that every prefix is
balanced: among rows with one image, row i is of kind `KINDS[i % 4]`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from fovea_gym.environments.base import Environment, Split
from fovea_gym.environments.hash_splits import row_generator, split_of
from fovea_gym.environments.shapes.questions import KINDS, Scene, SceneKind, comparison, in_words, scene
from fovea_gym.environments.shapes.scenes import Thing, draw, with_noise
from fovea_gym.graders.base import Grade, shown
from fovea_gym.graders.math_answer import last_boxed
from fovea_gym.rows.tasks import LazyTasks
from fovea_gym.settings.environments import ShapesEnvironment
from fovea_gym.types import AnswerEnd, ImageRef, Message, Score, Task, Turn

Kind: TypeAlias = SceneKind | Literal["comparison", "text"]

_BOX = re.compile(r"\\boxed\{[^{}]*\}")


class Slot(NamedTuple):
    """The kind and place of a row, known without rendering it."""

    kind: Kind
    scene_kind: SceneKind
    """The kind of question about a single scene, drawn or in words."""
    level: int
    turn: int
    """The number of earlier rows of this kind, scene kind and level; it selects the answer."""


class ShapesGrader:
    """The grader of `shapes`: a response is right if it is the boxed answer and nothing else."""

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        graded = grade(turns[-1].text, task.answer)
        return Score(reward=graded.score, accuracy=graded.score, parts=graded.parts)


class Shapes(Environment):
    """The environment `shapes`, whose settings are `ShapesEnvironment`."""

    answer_end = AnswerEnd()
    graders = (ShapesGrader(),)

    def __init__(self, config: ShapesEnvironment, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._levels = config.levels
        # exact decimal fractions: 0.1 is a tenth
        self._text_share = Fraction(str(config.text_share))
        self._comparison_share = Fraction(str(config.comparison_share))

    def tasks(self, split: Split) -> Sequence[Task]:
        sizes = {
            "train": self._config.train_size,
            "dev": self._config.dev_size,
            "test": self._config.test_size,
        }
        return LazyTasks(
            lambda index: self._task(split, index),
            range(sizes[split]),
            kind_of=lambda index: self._slot(index).kind,
            level_of=(lambda index: str(self._slot(index).level)) if isinstance(self._config.level, tuple) else None,
        )

    def prompt(self, task: Task) -> Sequence[Message]:
        return (Message(role="user", parts=(*task.images, task.question)),)

    def target(self, task: Task) -> str:
        return in_box(task.answer)

    def _slot(self, index: int) -> Slot:
        """The slot of a row; text rows and comparisons are spread evenly among those with one image."""
        texts, is_text = _spread(index, self._text_share)
        if is_text:
            return self._scene_slot("text", texts)
        others = index - texts
        comparisons, is_comparison = _spread(others, self._comparison_share / (1 - self._text_share))
        if is_comparison:
            turn, level = divmod(comparisons, len(self._levels))
            return Slot("comparison", KINDS[0], self._levels[level], turn)
        return self._scene_slot(None, others - comparisons)

    def _scene_slot(self, kind: Literal["text"] | None, place: int) -> Slot:
        turn, scene_kind = divmod(place, len(KINDS))
        turn, level = divmod(turn, len(self._levels))
        return Slot(kind or KINDS[scene_kind], KINDS[scene_kind], self._levels[level], turn)

    def _task(self, split: Split, index: int) -> Task:
        rng = row_generator(self._seed, split, index)
        slot, task_id = self._slot(index), f"{split}/{index}"
        if slot.kind == "comparison":
            pair = comparison(slot.turn, slot.level, rng)
            images = tuple(
                self._image(things, slot.level, split, rng, where=f"shapes {task_id}, image {number}")
                for number, things in enumerate(pair.pictures, start=1)
            )
            return Task(id=task_id, question=pair.question, answer=pair.answer, images=images, kind=slot.kind)
        seen = scene(slot.scene_kind, slot.turn, slot.level, rng)
        if slot.kind == "text":
            return Task(id=task_id, question=_text_question(seen, split, rng), answer=seen.answer, kind=slot.kind)
        image = self._image(seen.things, slot.level, split, rng, where=f"shapes {task_id}")
        return Task(id=task_id, question=seen.question, answer=seen.answer, images=(image,), kind=slot.kind)

    def _image(
        self, things: Sequence[Thing], level: int, split: Split, rng: np.random.Generator, *, where: str
    ) -> ImageRef:
        canvas_YXC = draw(things, self._config.image_side_px, rng, free=level == 3)
        return ImageRef(source=with_noise(canvas_YXC, split, rng), where=where)


def grade(prediction: str, truth: str) -> Grade:
    """Grade a response against the true answer: only the boxed answer with nothing around it is right."""
    # the policy would learn any other form that earned reward
    text, boxed = prediction.strip(), last_boxed(prediction)
    is_right = text == in_box(truth)
    parts = {"answer": float(boxed == truth), "format": float(_BOX.fullmatch(text) is not None)}
    reason = f"{shown(text)} {'is' if is_right else 'is not'} {shown(in_box(truth))}"
    return Grade(score=float(is_right), parts=parts, reason=reason)


def in_box(answer: str) -> str:
    """The answer in a box, the only form that is graded as right."""
    return rf"\boxed{{{answer}}}"


def _text_question(seen: Scene, split: Split, rng: np.random.Generator) -> str:
    question = in_words(seen, rng)
    while split_of(question.encode()) != split:
        question = in_words(seen, rng)
    return question


def _spread(index: int, share: Fraction) -> tuple[int, bool]:
    """The number of the first `index` rows that belong to an evenly spread share, and whether row `index` does."""
    before = index * share.numerator // share.denominator
    return before, (index + 1) * share.numerator // share.denominator > before
