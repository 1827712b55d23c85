"""The user's own code: found and checked, its scores read, and what it does wrong named and bounded."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fovea.config.loading import load_config
from fovea.config.run import Config
from fovea.data.curriculum import CurriculumProgress
from fovea.wiring.environment import make_environment
from fovea_gym.environments.access import GradedEnvironment
from fovea_gym.environments.custom.environment import UserEnvironment
from fovea_gym.environments.custom.grader import OpenedImages, UserGrader, checked_score, score_function, score_of
from fovea_gym.environments.custom.loading import checked_reward, load_reward
from fovea_gym.environments.sessions import LimitedSessions
from fovea_gym.environments.stages import Stage, Stages
from fovea_gym.errors import ConfigError, DataError, ScoreError, UnscoredError
from fovea_gym.graders.grading import MAX_LATE_CALLS, CallLimits, CallThreads, Grading, LimitedCalls
from fovea_gym.types import ImageRef, Mark, Message, Score, Task, Turn
from gym_tests.bandit import BanditEnvironment
from gym_tests.grading import score_in_run
from gym_tests.tables import table

CONFIG = Config.model_validate({"model": {"tiny": {}}})
TASK = BanditEnvironment().tasks("train")[0]
ANSWER = "an answer"
CLASS = """
from fovea_gym.types import Message, Score, Task

class Letters:
    def __init__(self, settings):
        self.letter = settings.get("letter", "a")
    def tasks(self, split):
        return [Task(id=f"{split}/0", question="?", answer=self.letter)]
    def prompt(self, task):
        return [Message(role="user", parts=(task.question,))]
    def score(self, task, turns):
        return Score(reward=2.0, accuracy=float(turns[-1].text == task.answer))
    def target(self, task):
        return task.answer

class NoTarget:
    tasks = prompt = lambda self, one: []
    score = lambda self, task, turns: 0
class WrongScore(NoTarget):
    target = prompt = lambda self, task: "a"
    score = lambda self, task: 0
value = 1
class Breaks:
    def __init__(self): raise KeyError("no such key")
"""


def written(folder: Path, text: str, name: str = "mine.py") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def unopened(ref: ImageRef) -> Image.Image:
    raise AssertionError(f"{ref} was opened")


def own(function: Callable[..., object], **limits: object) -> Grading:
    grader = UserGrader(score_function(function, unopened), CallThreads("mine.py:f"))
    return Grading(graders=(grader,), calls=LimitedCalls(CallLimits(name="mine.py:f", settings="reward_", **limits)))  # type: ignore[arg-type]


def scores(reward: float = 1.0, accuracy: float = 1.0, **fields: Any) -> Score:
    return Score(reward=reward, accuracy=accuracy, **fields)


BOX = Mark(image=2, xy=(0.1, 0.2, 0.5, 1.0), label="truth")
IMAGES = [{"seen": 1}, {"seen": 0.5, "named": np.int64(2)}]


@table(
    ("returned", "score"),
    [
        (0.5, scores(0.5, 0.5)),
        (True, scores(1, 1)),
        (-3, scores(-3, 0)),
        (np.float32(0.25), scores(0.25, 0.25)),
        (torch.tensor(4.0), scores(4, 1)),
        (Decimal("0.5"), scores(0.5, 0.5)),
        (Fraction(1, 4), scores(0.25, 0.25)),
        (np.bool_(True), scores(1, 1)),
        ({"answer": 0.5, "format": 0.25}, scores(0.75, 0.75, parts={"answer": 0.5, "format": 0.25})),
        ({"answer": 0.5, "reward": 7, "accuracy": 0.1}, scores(7, 0.1, parts={"answer": 0.5, "accuracy": 0.1})),
        (scores(3, 0.5, parts={"a": 1}), scores(3, 0.5, parts={"a": 1})),
        ({"a": 1, "image_parts": IMAGES}, scores(parts={"a": 1}, image_parts=({"seen": 1}, {"seen": 0.5, "named": 2}))),
        ({"a": 1, "marks": [replace(BOX, xy=(0.1, 0.2, np.float32(0.5), 1))]}, scores(parts={"a": 1}, marks=(BOX,))),
        ({"turns": [1.0], "a": 0.5, "accuracy": 0}, scores(1, 0, parts={"a": 0.5, "accuracy": 0}, turns=(1,))),
    ],
)
def test_what_a_function_returns_is_a_score(returned: object, score: Score) -> None:
    found = score_of(returned, num_images=2)
    assert found == score
    assert type(found.reward) is float


def test_names_and_places_of_a_score_are_plain_and_rewards_of_turns_sum_to_the_reward() -> None:
    """As its records and metrics are written, which NumPy's numbers and mixed keys would end."""
    marks = (Mark(image=np.int64(1), xy=np.array([0.5, 1.0])),)  # type: ignore[arg-type]
    score = score_of(scores(parts={1: 2.0, "a": 3.0}, marks=marks), num_images=1)
    assert score.parts == {"1": 2.0, "a": 3.0}
    assert json.dumps([score.marks[0].image, score.marks[0].xy]) == "[1, [0.5, 1.0]]"
    turns = (Turn(messages=(), text="a"), Turn(messages=(), text="b"))
    expected = Score(reward=0.75, accuracy=0.75, turns=(1.0, -0.25))
    for returned in ({"turns": [1, np.float32(-0.25)]}, {"turns": [1, -0.25], "reward": 0.75}, expected):
        assert checked_score(returned, TASK, turns) == expected


MANY = {str(n): 0.0 for n in range(101)}
NO_TURNS = [
    (None, "None as turns, which is not a list with the reward of every turn"),
    ("12", "'12' as turns, which is not a list"),
    ([1, None], "None as the reward of turn 2, which is not a number"),
    ([math.nan, 1], "nan as the reward of turn 1, which is not finite"),
    ([1, 1], "a reward of 1, but turns that sum to 2; give turns without a reward"),
]


@table(
    ("returned", "problem"),
    [
        (None, "None, which is not a number (is there a `return`?); a score is a number or named parts; fix it"),
        ("1.0", "'1.0', which is not a number; a score is a number or named parts; fix it"),
        (float("nan"), "nan, which is not finite"),
        ({}, "{}, which names no part and no reward"),
        ({"image_parts": []}, "which names no part and no reward"),
        (MANY, "101 parts, and each is a separate metric; return at most 100"),
        ({"overlong": 0.0, "found": 1.0}, "a part overlong: the metric reward/overlong is the penalty of algorithm"),
        ({"caf\udce9": 0.0}, r"a part 'caf\udce9', which holds half of a UTF-16 pair, which no plot can show; rename"),
        ({"reward": 1, "image_parts": [{"caf\udce9": 0}, {}]}, r"a part 'caf\udce9', which holds half of a UTF-16"),
        ({"reward": 1, "marks": [replace(BOX, label="\ud800")]}, r"a mark labelled '\ud800', which holds half of"),
        (10**400, "a number beyond 1e308, which is not finite"),
        ({"a": -(10**5000)}, "a number as a beyond 1e308, which is not finite"),
        (Score(reward=10**400, accuracy=0), "a number as reward beyond 1e308"),
        (Score(reward=0, accuracy=10**400), "a number as accuracy beyond 1e308"),
        ({"turns": [10**400]}, "a number as the reward of turn 1 beyond 1e308"),
        ({"reward": 1, "marks": [replace(BOX, image=10**400)]}, "a number as the image of a mark beyond 1e308"),
        (Fraction(10**5000, 3), "a number beyond 1e308"),
        (Decimal("1e400"), "inf, which is not finite"),
        (Decimal("sNaN"), "Decimal('sNaN'), which is not one number"),
        (np.complex64(1), "which is not a number"),
        ({"reward": 1, "image_parts": [MANY]}, "101 parts, and each is a separate metric"),
        ({"reward": 1, "image_parts": [{"seen": 1}]}, "image_parts for 1 images, but the task has 2"),
        ({"reward": 1, "image_parts": [1, 2]}, "[1, 2] as image_parts, which is not a list of mappings"),
        ({"answer": float("inf")}, "inf as answer, which is not finite"),
        ({"answer": 1, "format": None}, "None as format, which is not a number"),
        (np.ones(2), "which is not one number"),
        (torch.ones(2), "which is not one number"),
        (Score(reward=float("nan"), accuracy=0), "nan as reward"),
        (Score(reward=0, accuracy=float("nan")), "nan as accuracy"),
        (scores(parts=None), "None as parts, which is not a mapping of names to numbers"),
        (scores(image_parts=None), "None as image_parts, which is not a list of mappings"),
        (scores(marks=None), "None as marks, which is not a list of fovea_gym.types.Mark"),
        (scores(marks=(1, 2)), "(1, 2) as marks, which is not a list of fovea_gym.types.Mark"),
        (scores(marks=(replace(BOX, xy=None),)), "a mark at None; give x, y of a point or x1, y1, x2, y2 of a box"),
        (scores(marks=(replace(BOX, xy=(0.5,)),)), "a mark at (0.5,); give x, y of a point"),
        (scores(marks=(replace(BOX, image="1"),)), "'1' as the image of a mark"),
        (scores(marks=(replace(BOX, image=3),)), "a mark on image 3, but the task has 2 images, counted from 1"),
        (scores(marks=(BOX,) * 101), "101 marks; return at most 100"),
        *((scores(turns=turns), problem) for turns, problem in NO_TURNS),
        *(({"reward": 1.0, "turns": turns}, problem) for turns, problem in NO_TURNS),
        ({"turns": [1, -0.25]}, "2 rewards as turns, but the episode has 1 turns; give one per turn"),
    ],
)
def test_what_is_no_score_is_named(returned: object, problem: str) -> None:
    task = replace(TASK, images=(ImageRef(source=b""),) * 2)
    with pytest.raises(ScoreError, match=rf"^train/0: mine\.py:f returned .*{re.escape(problem)}") as failed:
        score_in_run(own(lambda task, text, images: returned), task, ANSWER)
    assert str(failed.value).endswith("or set reward_on_failure=drop to leave such groups out")
    assert not isinstance(failed.value, UnscoredError)


@table("returned", [1e30, -1e308, {"answer": 2e6}, {"answer": 9e5, "format": 9e5}, Score(reward=1e7, accuracy=1)])
def test_a_reward_and_a_sum_of_parts_beyond_the_limit(returned: object) -> None:
    problem = r"^train/0: the reward of 'an answer' is -?\d.*, beyond 1e\+06; scale it down$"
    with pytest.raises(DataError, match=problem):
        score_in_run(own(lambda task, text, images: returned), TASK, ANSWER)
    assert score_in_run(own(lambda task, text, images: -1e6), TASK, ANSWER).reward == -1e6


def raises(error: BaseException) -> Callable[..., float]:
    def score(task: Task, text: str, images: Sequence[Image.Image]) -> float:
        raise error

    return score


def test_what_a_function_raises_is_named_by_its_first_line() -> None:
    with pytest.raises(UnscoredError, match=r"^train/0: mine\.py:f raised ValueError: first line at .*\.py:\d+$"):
        score_in_run(own(raises(ValueError("first line\nsecond line")), on_failure="drop"), TASK, ANSWER)
    with pytest.raises(ScoreError, match=r"^train/0: mine\.py:f raised SystemExit: 3 at .*\.py:\d+; fix it"):
        score_in_run(own(raises(SystemExit(3))), TASK, ANSWER)


def test_a_call_that_is_late_is_not_waited_for_and_too_many_end_the_run() -> None:
    let_go = threading.Event()
    grading = own(lambda task, text, images: let_go.wait(60), timeout_seconds=0.02, on_failure="drop")
    started = time.perf_counter()
    try:
        for _ in range(MAX_LATE_CALLS - 1):
            with pytest.raises(UnscoredError, match=r"mine\.py:f took more than reward_timeout_seconds=0\.02$"):
                score_in_run(grading, TASK, ANSWER)
        with pytest.raises(ScoreError, match=r"8 calls of mine\.py:f still run") as last:
            score_in_run(grading, TASK, ANSWER)
        assert not isinstance(last.value, UnscoredError)
    finally:
        let_go.set()
    assert time.perf_counter() - started < 30
    # those that have ended are forgotten
    grading = own(lambda task, text, images: time.sleep(0.05), timeout_seconds=0.001, on_failure="drop")
    for _ in range(MAX_LATE_CALLS + 2):
        with pytest.raises(UnscoredError):
            score_in_run(grading, TASK, ANSWER)
        time.sleep(0.1)


def test_images_are_opened_when_looked_at() -> None:
    opened = []

    def opener(ref: ImageRef) -> Image.Image:
        opened.append(ref.where)
        return Image.new("RGB", (len(ref.where), 1))

    images = OpenedImages([ImageRef(source=b"", where=where) for where in ("a", "bb", "ccc")], opener)
    assert (len(images), opened) == (3, [])
    assert images[-1].width == images[2].width == 3
    assert opened == ["ccc"]
    assert [image.width for image in images] == [1, 2, 3]
    assert [image.width for image in images[1:]] == [2, 3]
    assert opened == ["ccc", "a", "bb"]
    with pytest.raises(IndexError):
        images[3]


FUNCTIONS = """
value = 3
def score(task, text, images): return len(text)
def other(text): return 0
def partly(task, text, images, scale=2): return scale
"""


def test_a_function_is_found_in_its_file(in_tmp_path: None) -> None:
    written(Path(), FUNCTIONS)
    assert load_reward("mine.py:score")(TASK, "four", []) == 4
    assert load_reward("./mine.py:partly")(TASK, "", []) == 2
    config = Config.model_validate({"model": {"tiny": {}}, "reward": "mine.py:score", "reward_calls_at_once": 2})
    made, inner = make_environment(config, BanditEnvironment()), BanditEnvironment()
    assert made.grading.calls is not None
    assert made.grading.calls.limits.calls_at_once == 2
    assert score_in_run(made.grading, TASK, ANSWER).reward == len("an answer")
    # rows and prompts stay the environment's
    environment = made.environment
    assert (environment.tasks("dev"), environment.prompt(TASK)) == (inner.tasks("dev"), inner.prompt(TASK))
    assert environment.target(TASK) == inner.target(TASK)


@table(
    ("spec", "problem"),
    [
        ("mine.py", "write path/to/file.py:name"),
        ("mine.txt:score", "write path/to/file.py:name"),
        ("none.py:score", r"there is no file none\.py in /.*; fix the path"),
        ("mine.py:scores", r"mine\.py has no scores; did you mean score\?"),
        ("mine.py:zzz", r"define it, or name another: score, other, partly"),
        ("mine.py:value", "is int, not a function"),
        ("mine.py:other", r"other takes \(text\), but is called as other\(task, text, images\); write def other\(task"),
        ("broken.py:score", r"broken\.py cannot be imported: it raised ZeroDivisionError: .* at broken.py:1;"),
        ("syntax.py:score", r"syntax\.py cannot be imported: it raised SyntaxError: .*; fix it"),
        ("leaves.py:score", r"leaves\.py cannot be imported: it raised SystemExit: 0 at leaves.py:1; fix it"),
    ],
)
def test_a_function_that_is_none_is_named(spec: str, problem: str, in_tmp_path: None) -> None:
    files = {"mine": FUNCTIONS, "broken": "x = 1 / 0", "syntax": "def score(:", "leaves": "import sys; sys.exit(0)"}
    for name, text in files.items():
        written(Path(), text, f"{name}.py")
    with pytest.raises(ConfigError, match=problem) as refused:
        load_reward(spec)
    assert "\n" not in str(refused.value)


def test_a_lambda_is_corrected_as_a_lambda() -> None:
    with pytest.raises(ConfigError, match=r"<lambda> takes \(text\), .*; write lambda task, text, images: \.\.\."):
        checked_reward(lambda text: 1.0, "<lambda>")


def environment_of(*overrides: str) -> GradedEnvironment:
    made = make_environment(load_config([], ["model.tiny={}", *overrides]))
    assert isinstance(made.environment, UserEnvironment)
    return made


def test_a_class_is_the_environment(tmp_path: Path) -> None:
    file = written(tmp_path, CLASS)
    # the choice comes first, wherever it is written
    made = environment_of("environment.settings.letter=b", f"environment={file}:Letters")
    environment = made.environment
    (task,) = environment.tasks("test")
    assert environment.prompt(task)[0].parts == ("?",)
    assert score_in_run(made.grading, task, environment.target(task)).accuracy == 1
    assert score_in_run(made.grading, task, ANSWER) == Score(reward=2.0, accuracy=0.0)
    assert (environment.target(task), environment.demonstration(task)) == ("b", ("b",))
    assert environment.reply(task, [Turn(messages=(), text=ANSWER)]) is None
    assert made.stages == Stages()
    (other,) = environment_of(f"environment={{name: own, file: '{file}:Letters'}}").environment.tasks("dev")
    assert environment_of(f"environment={file}:Letters").environment.target(other) == "a"


@table(
    ("name", "settings", "problem"),
    [
        ("NoTarget", "", r"NoTarget has no method target; add target\(task\)"),
        ("WrongScore", "", r"WrongScore\.score takes \(task\), but is called as .*score\(task, turns\)"),
        ("Breaks", "", "cannot be made: it raised KeyError: 'no such key'"),
        ("Breaks", "environment.settings.a=1", "environment.settings is set, but .* takes none"),
        ("Task", "", "cannot be made: it raised TypeError"),
        ("Letter", "", "did you mean Letters"),
        ("value", "", "is not a class; name one with the methods tasks, prompt, score, target"),
    ],
)
def test_a_class_that_is_none_is_named(name: str, settings: str, problem: str, tmp_path: Path) -> None:
    file = written(tmp_path, CLASS)
    with pytest.raises(ConfigError, match=problem):
        environment_of(f"environment={file}:{name}", *filter(None, [settings]))


class Failing(BanditEnvironment):
    def prompt(self, task: Task) -> list:  # type: ignore[type-arg]
        raise RuntimeError("no prompt")

    def target(self, task: Task) -> str:
        raise RuntimeError("no target")

    def tasks(self, split: str) -> list[Task]:
        return [] if split == "train" else ["no task"]  # type: ignore[list-item]

    def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        raise RuntimeError("no score")


def test_what_a_class_does_wrong_is_named() -> None:
    environment = UserEnvironment(Failing(), "mine.py:C")
    prompt = r"^train/0: mine\.py:C\.prompt raised RuntimeError: no prompt at .*\.py:\d+; fix it"
    with pytest.raises(DataError, match=prompt):
        environment.prompt(TASK)
    with pytest.raises(DataError, match=r"^train/0: mine\.py:C\.target raised RuntimeError: no target"):
        environment.target(TASK)
    with pytest.raises(DataError, match=r"^mine\.py:C\.tasks\('train'\) holds no rows; return some"):
        environment.tasks("train")
    with pytest.raises(DataError, match=r"holds 'no task' \(of type str\); return a list of fovea_gym\.types\.Task"):
        environment.tasks("dev")
    with pytest.raises(ScoreError, match=r"^train/0: Failing\.score raised RuntimeError: no score at .*\.py:\d+; fix"):
        score_in_run(make_environment(CONFIG, Failing()).grading, TASK, ANSWER)


class Growing(BanditEnvironment):
    stages = (Stage(name="easy"), Stage(name="hard"))
    default_starts = (5,)

    def __init__(self, stage: int = 1) -> None:
        self.stage = stage

    def at(self, stage: int) -> Growing:
        return Growing(stage)

    def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        return Score(reward=self.stage, accuracy=0.0)


def test_a_class_may_have_stages() -> None:
    made = make_environment(CONFIG, Growing())
    curriculum, rewards = CurriculumProgress(made.stages), []
    for step in (0, 5):
        curriculum.begin_step(step)
        rewards.append(score_in_run(made.grading.at(curriculum.stage), TASK, ANSWER).reward)
    assert (rewards, score_in_run(made.grading, TASK, ANSWER).reward) == ([0, 1], 1)


class Asks(BanditEnvironment):
    """Scores without a thread, and has two turns."""

    max_turns = 2

    async def score(self, task: Task, turns: Sequence[Turn]) -> float:  # type: ignore[override]
        if turns[-1].text == "wait":
            await asyncio.sleep(60)
        return {"one": 1.0}[turns[-1].text]

    def reply(self, task: Task, turns: Sequence[Turn]) -> list[Message] | None:
        return None if len(turns) > 1 else [Message(role="user", parts=("again",))]

    def demonstration(self, task: Task) -> list[str]:
        return ["first", "then"]


def test_a_score_may_be_async_and_a_class_may_reply() -> None:
    made = make_environment(CONFIG.model_copy(update={"reward_timeout_seconds": 0.05}), Asks())
    assert score_in_run(made.grading, TASK, "one").reward == 1
    with pytest.raises(ScoreError, match=r"^train/0: Asks\.score raised KeyError: 'two' at .*\.py:\d+; fix it"):
        score_in_run(made.grading, TASK, "two")
    with pytest.raises(ScoreError, match=r"^train/0: Asks\.score took more than reward_timeout_seconds=0\.05; fix it"):
        score_in_run(made.grading, TASK, "wait")
    turn = Turn(messages=(), text="one")
    assert isinstance(made.environment, LimitedSessions)
    replies = [made.environment.inside.reply(TASK, turns) for turns in ([turn], [turn, turn])]
    assert replies == [[Message(role="user", parts=("again",))], None]
    assert made.environment.max_turns == 2
    assert made.environment.demonstration(TASK) == ["first", "then"]


class Plain:
    """The methods of an environment of one turn, without a base class."""

    def tasks(self, split: str) -> list[Task]:
        return [TASK]

    def prompt(self, task: Task) -> list[Message]:
        return []

    def target(self, task: Task) -> str:
        return task.answer

    def score(self, task: Task, turns: Sequence[Turn]) -> float:
        return 0.0


@table(
    ("attributes", "problem"),
    [
        ({"answer_end": "</a>"}, r"Own has answer_end='</a>'; set fovea_gym.types.AnswerEnd\(\), for a box"),
        ({"reply": lambda self, task, turns: []}, "Own has a method reply, but no max_turns; add max_turns = 4"),
        ({"max_turns": 0}, "Own has max_turns=0; set a whole number of at least 1"),
        ({"stages": (), "default_starts": (), "at": None}, r"Own has no method at; add at\(stage\)"),
        ({"stages": ("a",), "at": lambda self, stage: self}, r"environment=Own has stages, but no default_starts; add"),
    ],
)
def test_attributes_of_a_class_that_do_not_fit_are_named(attributes: dict[str, Any], problem: str) -> None:
    assert make_environment(CONFIG, Plain()).environment.max_turns == 1
    with pytest.raises(ConfigError, match=problem):
        make_environment(CONFIG, type("Own", (Plain,), attributes)())
