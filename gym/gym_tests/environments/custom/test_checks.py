"""What a user's environment returns against what is documented: one line that names the method and the fix."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fovea_gym.environments.custom.environment import UserEnvironment
from fovea_gym.errors import DataError
from fovea_gym.types import ImageRef, Message, Task, Turn
from gym_tests.tables import table

PICTURE = Image.new("RGB", (2, 2))
TASK = Task(id="train/0", question="Which colour?", answer="red", images=(ImageRef(source=PICTURE),))
PROMPT = Message(role="user", parts=(*TASK.images, TASK.question))
TURN = Turn(messages=(PROMPT,), text="look")


class Returns:
    """An environment of two turns whose methods return what they are told."""

    max_turns = 2

    def __init__(self, **returned: Any) -> None:
        self._returned = {"tasks": [TASK], "prompt": [PROMPT], "target": "red"} | returned

    def __getattr__(self, method: str) -> Any:
        if method not in self._returned:
            raise AttributeError(method)
        return lambda *_: self._returned[method]


def returns(**returned: Any) -> UserEnvironment:
    return UserEnvironment(Returns(**returned), "mine.py:C")


def test_what_is_documented_passes() -> None:
    refs = (b"\x89PNG", "photo.png", np.zeros((2, 2, 3), np.uint8), PICTURE)
    tasks = (replace(TASK, images=[ImageRef(source=each) for each in refs]), replace(TASK, id="train/1", images=()))  # type: ignore[arg-type]
    environment = returns(tasks=tasks, reply=(PROMPT,), demonstration=("look", "red"))
    assert environment.tasks("train") is tasks
    assert environment.prompt(TASK) == [PROMPT]
    assert environment.reply(TASK, [TURN]) == (PROMPT,)
    assert environment.demonstration(TASK) == ("look", "red")
    assert returns(reply=None).reply(TASK, [TURN]) is None


@table(
    ("tasks", "problem"),
    [
        ([TASK, replace(TASK, answer="x")], "holds two rows of id 'train/0'; give every row of a split a separate id"),
        ([TASK, "row"], "holds 'row' (of type str); return a list of fovea_gym.types.Task"),
        ([replace(TASK, answer=3)], "id 'train/0' with answer=3 (of type int); give a text, such as answer=str(...)"),  # type: ignore[arg-type]
        (
            [replace(TASK, question="caf\udce9?")],
            r"with question='caf\udce9?' (of type str): character 3 is half of a UTF-16 pair, which no tokenizer "
            "or file accepts; decode the bytes with errors='replace'",
        ),
        ([replace(TASK, id=3)], "Task of id 3 with id=3 (of type int); give a text, such as id=str(...)"),  # type: ignore[arg-type]
        ([replace(TASK, images=(PICTURE,))], "give a picture as fovea_gym.types.ImageRef(source=picture)"),  # type: ignore[arg-type]
        ([replace(TASK, images=PICTURE)], "(of type Image); give a tuple, images=(ImageRef(source=...),)"),  # type: ignore[arg-type]
        (
            [replace(TASK, images=(ImageRef(source=Path("a.png")),))],  # type: ignore[arg-type]
            "Task of id 'train/0' with the image ImageRef(source=PosixPath('a.png') (of type PosixPath)); give encoded "
            "bytes, a path or URL as a text, a numpy array of RGB values or a Pillow image",
        ),
    ],
)
def test_rows_that_are_none_are_named(tasks: list[Task], problem: str) -> None:
    with pytest.raises(DataError, match=rf"^mine\.py:C\.tasks\('train'\) .*{re.escape(problem)}$") as refused:
        returns(tasks=tasks).tasks("train")
    assert "\n" not in str(refused.value)


class Lazy(Sequence[Task]):
    """Rows made on access, all of one id, and all but the first without a text as their answer."""

    def __init__(self) -> None:
        self.made = list[int]()

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: Any) -> Any:
        self.made.append(index)
        return replace(TASK, answer=index) if index else TASK

    def __iter__(self) -> Iterator[Task]:
        raise AssertionError("all rows are made")


def test_rows_that_are_made_on_access_are_checked_where_they_come_by() -> None:
    lazy = Lazy()
    environment = returns(tasks=lazy)
    tasks = environment.tasks("train")
    assert set(lazy.made) == {0}
    assert environment.prompt(tasks[0]) == [PROMPT]
    problem = r"^mine\.py:C\.tasks holds a Task of id 'train/0' with answer=5 \(of type int\); give a text"
    with pytest.raises(DataError, match=problem):
        environment.prompt(tasks[5])


@table(
    ("messages", "problem"),
    [
        (
            "Dark or light?",
            "returned 'Dark or light?' (of type str); return a list of fovea_gym.types.Message, [Message(",
        ),
        (PROMPT, "(of type Message); return a list of fovea_gym.types.Message, [Message("),
        ([], "returned [] (of type list); return a list of fovea_gym.types.Message"),
        ([{"role": "user"}], "returned a list that holds {'role': 'user'} (of type dict); return a list of"),
        ([Message(role="human", parts=("?",))], "with role='human' (of type str); set one of system, user, assistant"),  # type: ignore[arg-type]
        ([Message(role="user", parts="Dark?")], "with parts='Dark?' (of type str); give a tuple, such as parts=(task."),
        ([Message(role="user", parts=("\ud800",))], r"with the part '\ud800' (of type str): character 0 is half of a"),
        (
            [Message(role="user", parts=(PICTURE, "?"))],
            "(of type Image); give a picture as fovea_gym.types.ImageRef(source=picture)",
        ),  # type: ignore[arg-type]
    ],
)
def test_messages_that_are_none_are_named(messages: Any, problem: str) -> None:
    with pytest.raises(DataError, match=rf"^train/0: mine\.py:C\.prompt .*{re.escape(problem)}") as refused:
        returns(prompt=messages).prompt(TASK)
    assert "\n" not in str(refused.value)
    with pytest.raises(DataError, match=rf"^train/0: mine\.py:C\.reply .*{re.escape(problem)}"):
        returns(reply=messages).reply(TASK, [TURN])
    with pytest.raises(DataError, match=r"\)\], or None to end the episode$"):
        returns(reply="more").reply(TASK, [TURN])


@table(
    ("answers", "problem"),
    [
        ("dark", "returned 'dark' (of type str); return a list with one text for every turn"),
        (["look", "\ud800"], r"returned the answer '\ud800' (of type str): character 0 is half of a UTF-16 pair"),
        (["look", 1], "returned the answer 1 (of type int); return a text"),
        (["look"] * 3, "returned 3 answers, but an episode has 1 to max_turns=2; return one for every turn, or change"),
        ([], "returned 0 answers, but an episode has 1 to max_turns=2"),
    ],
)
def test_a_demonstration_that_is_none_is_named(answers: Any, problem: str) -> None:
    with pytest.raises(DataError, match=rf"^train/0: mine\.py:C\.demonstration {re.escape(problem)}"):
        returns(demonstration=answers).demonstration(TASK)


def test_a_target_is_a_text() -> None:
    with pytest.raises(DataError, match=r"^train/0: mine\.py:C\.target returned the answer 3 \(of type int\); return"):
        returns(target=3).target(TASK)
