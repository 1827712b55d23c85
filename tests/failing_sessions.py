"""An environment whose sessions fail now and then, and settings of small runs of it."""

from __future__ import annotations

from collections.abc import Sequence

from fovea.run.warmup import SESSION_SEED
from fovea_gym.types import Message, Score, Task, Turn

SETTINGS = {
    "model": {"tiny": {"hidden_size": 32, "num_layers": 1, "vocabulary_size": 300}},
    "max_steps": 2,
    "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 2},
    "parity": {"prompts": 2},
    "evaluate": {"dev_size": 2, "test_size": 2, "image_controls": False, "shared_images": "ignore"},
    "log": {"tensorboard": False, "progress": False},
    "environment": {"name": "shapes"},
}
WARMUP = {"max_steps": 2, "check_every_steps": 2, "batch_size": 4}


class Door:
    def __init__(self, opens: bool) -> None:
        self.opens = opens

    def reply(self, turns: Sequence[Turn]) -> list[Message]:
        if not self.opens:
            raise KeyError("no such door")
        return [Message(role="user", parts=("go on",))]

    def score(self, turns: Sequence[Turn]) -> Score:
        return Score(reward=float(len(turns[0].text)), accuracy=0.0)


class Doors:
    """Two turns; a share of the sessions fails in training, and of the demonstrations those of some rows."""

    max_turns = 2

    def __init__(self, *, failing: int, demonstrated: int = 0) -> None:
        self.failing, self.demonstrated = failing, demonstrated

    def tasks(self, split: str) -> list[Task]:
        return [Task(id=f"{split}/{number}", question=f"Door {number}?", answer="a") for number in range(8)]

    def prompt(self, task: Task) -> list[Message]:
        return [Message(role="user", parts=(task.question,))]

    def target(self, task: Task) -> str:
        return task.answer

    def demonstration(self, task: Task) -> list[str]:
        return ["a", "b"]

    def open(self, task: Task, seed: int) -> Door:
        if seed == SESSION_SEED:
            return Door(int(task.id.rpartition("/")[2]) >= self.demonstrated)
        return Door(seed % 4 >= self.failing or "train" not in task.id)


class FailingDoors(Doors):
    """`environment=tests/failing_sessions.py:FailingDoors`: 3 of 4 sessions and 7 of 8 demonstrations fail."""

    def __init__(self) -> None:
        super().__init__(failing=3, demonstrated=7)
