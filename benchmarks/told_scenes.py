r"""Counting in scenes where the text of some questions gives the answer: RL could learn to read instead of to look.

    fovea train boxes environment=benchmarks/told_scenes.py:ToldScenes rollout.max_new_tokens=8 \
        rollout.samples_per_prompt=8 warmup.stop_accuracy=0.5 evaluate.shared_images=ignore max_steps=200 \
        rollout.stop_after_answer=false algorithm.entropy_coef=0.02 algorithm.max_groups_without_signal=0

To use PAPO's masked view from the same warm-up, exported as START, add `model.tiny=null model.path=START warmup=null
algorithm.augmentation.name=papo algorithm.augmentation.mask_patch_px=8 algorithm.augmentation.mask_ratio=0.9
algorithm.augmentation.coef=0.02`.

Rows whose text gives the number have kind `told`, the others kind `seen`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fovea_gym.environments.base import Split
from fovea_gym.environments.shapes.environment import Shapes, ShapesGrader
from fovea_gym.environments.shapes.questions import KINDS, MAX_COUNT
from fovea_gym.rows.tasks import LazyTasks
from fovea_gym.settings.environments import ShapesEnvironment
from fovea_gym.types import Message, Score, Task, Turn

SIZES: Mapping[Split, int] = {"train": 6000, "dev": 200, "test": 400}
TOLD_OF_TEN = 3
"""Of every ten blocks of MAX_COUNT rows, the number whose questions give the answer."""


class ToldScenes:
    """Counting questions about the demo's scenes; three tenths of them have the number in the text."""

    def __init__(self) -> None:
        rows = {split: size * len(KINDS) for split, size in SIZES.items()}
        config = ShapesEnvironment(train_size=rows["train"], dev_size=rows["dev"], test_size=rows["test"])
        self._shapes = Shapes(config, seed=0)
        self._grader = ShapesGrader()

    def tasks(self, split: Split) -> Sequence[Task]:
        scenes = self._shapes.tasks(split)
        return LazyTasks(lambda row: _task(scenes, row), range(SIZES[split]), kind_of=_kind)

    def prompt(self, task: Task) -> Sequence[Message]:
        return self._shapes.prompt(task)

    def target(self, task: Task) -> str:
        return self._shapes.target(task)

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        return await self._grader.score(task, turns)


def _task(scenes: Sequence[Task], row: int) -> Task:
    task = scenes[row * len(KINDS)]  # the demo alternates between its kinds, and the first kind is counting
    told = f"There are {task.answer}. " if _kind(row) == "told" else ""
    return replace(task, question=f"{told}{task.question}", kind=_kind(row))


def _kind(row: int) -> str:
    # MAX_COUNT consecutive rows have all answers once, so the kind does not give away the answer
    return "told" if row // MAX_COUNT % 10 < TOLD_OF_TEN else "seen"
