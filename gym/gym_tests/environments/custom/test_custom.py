"""Environments and rewards in files of users: what they import, what they return, and the signatures of others."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fovea_gym.environments.custom.environment import UserEnvironment
from fovea_gym.environments.custom.grader import score_function, score_of
from fovea_gym.environments.custom.loading import checked_reward, load_named
from fovea_gym.environments.custom.signatures import takes_length
from fovea_gym.errors import ConfigError, DataError
from fovea_gym.rows.opening import default_opener
from fovea_gym.types import ImageRef, Message, Task, Turn
from fovea_gym.utils.event_loop import wait_for
from gym_tests.tables import table

IMPORTS = "from beside import NAME\ndef name(): return NAME\n"


@pytest.fixture(autouse=True)
def as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Paths and modules of this process are put back, those that the tests import included."""
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    before = dict(sys.modules)
    yield
    for name in sys.modules.keys() - before.keys():
        del sys.modules[name]


def written(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def name_in(spec: str) -> str:
    function: Any = load_named(spec, "reward")
    return str(function())


def test_modules_are_found_in_the_folder_of_the_file_and_then_in_the_working_directory() -> None:
    """Also by an import within a function, which comes later."""
    written(Path("sub/mine.py"), "from parts.names import NAME\ndef name(): return NAME\n")
    written(Path("parts/names.py"), "NAME = 'work'")
    assert name_in("sub/mine.py:name") == "work"
    written(Path("late/mine.py"), "def name():\n    from late_name import NAME\n    return NAME\n")
    written(Path("late/late_name.py"), "NAME = 'late'")
    assert name_in("late/mine.py:name") == "late"
    for folder in ("sub", "../elsewhere"):
        written(Path(folder, "mine.py"), IMPORTS)
        written(Path(folder, "beside.py"), f"NAME = '{folder}'")
        written(Path("beside.py"), "NAME = 'work'")
        assert name_in(f"{folder}/mine.py:name") == folder


def test_files_of_two_folders_have_their_own_modules_of_one_name() -> None:
    for folder in ("one", "two"):
        modules = {"mine": f"import parts.more\n{IMPORTS}", "beside": f"NAME = '{folder}'"}
        for name, text in {**modules, "parts/__init__": "", "parts/more": ""}.items():
            written(Path(folder, f"{name}.py"), text)
    for folder in ("one", "two", "two", "one"):
        assert name_in(f"{folder}/mine.py:name") == folder
    assert {sys.modules[name].__file__ for name in ("beside", "parts", "parts.more")} == {
        str(Path("one", name).resolve()) for name in ("beside.py", "parts/__init__.py", "parts/more.py")
    }


def test_modules_of_the_program_and_installed_packages_stay_what_they_are(tmp_path: Path) -> None:
    written(tmp_path / "program" / "beside.py", "NAME = 'program'")
    sys.path.insert(0, str(tmp_path / "program"))
    import beside  # type: ignore[import-not-found]  # noqa: PLC0415

    written(Path("sub/mine.py"), IMPORTS)
    written(Path("sub/beside.py"), "NAME = 'sub'")
    assert name_in("sub/mine.py:name") == "sub"
    assert sys.modules["beside"] is beside
    written(Path("other/mine.py"), "import json, numpy, fovea_gym\ndef name(): return numpy.__name__ + json.__name__\n")
    for name in ("json", "numpy", "fovea_gym"):
        written(Path(f"other/{name}.py"), "raise AssertionError")
    packages = [sys.modules[name] for name in ("json", "numpy", "fovea_gym")]
    assert name_in("other/mine.py:name") == "numpyjson"
    assert [sys.modules[name] for name in ("json", "numpy", "fovea_gym")] == packages


def test_the_search_path_does_not_grow_and_stays_in_order_after_an_error() -> None:
    written(Path("sub/mine.py"), "def name(): return 'sub'")
    written(Path("mine.py"), "import nowhere_at_all")
    before = list(sys.path)
    problem = r"it raised ModuleNotFoundError: No module named 'nowhere_at_all' at mine.py:1"
    with pytest.raises(ValueError, match=problem):
        name_in("mine.py:name")
    assert sys.path == [*before, str(Path.cwd())]
    for _ in range(3):
        name_in("sub/mine.py:name")
    assert sys.path == [*before, str(Path.cwd()), str(Path("sub").resolve())]


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


IS_HALF = "is half of a UTF-16 pair, which no tokenizer or file accepts; decode the bytes with errors='replace'"
IS_PATH = (
    "Task of id 'train/0' with the image ImageRef(source=PosixPath('a.png') (of type PosixPath)); give encoded bytes, "
    "a path or URL as a text, a numpy array of RGB values or a Pillow image"
)


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
        ([replace(TASK, question="caf\udce9?")], r"with question='caf\udce9?' (of type str): character 3 " + IS_HALF),
        ([replace(TASK, id=3)], "Task of id 3 with id=3 (of type int); give a text, such as id=str(...)"),  # type: ignore[arg-type]
        ([replace(TASK, images=(PICTURE,))], "give a picture as fovea_gym.types.ImageRef(source=picture)"),  # type: ignore[arg-type]
        ([replace(TASK, images=PICTURE)], "(of type Image); give a tuple, images=(ImageRef(source=...),)"),  # type: ignore[arg-type]
        ([replace(TASK, images=(ImageRef(source=Path("a.png")),))], IS_PATH),  # type: ignore[arg-type]
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
        ("Dark?", "returned 'Dark?' (of type str); return a list of fovea_gym.types.Message, [Message("),
        (PROMPT, "(of type Message); return a list of fovea_gym.types.Message, [Message("),
        ([], "returned [] (of type list); return a list of fovea_gym.types.Message"),
        ([{"role": "user"}], "returned a list that holds {'role': 'user'} (of type dict); return a list of"),
        ([Message(role="human", parts=("?",))], "with role='human' (of type str); set one of system, user, assistant"),  # type: ignore[arg-type]
        ([Message(role="user", parts="Dark?")], "with parts='Dark?' (of type str); give a tuple, such as parts=(task."),
        ([Message(role="user", parts=("\ud800",))], r"with the part '\ud800' (of type str): character 0 is half of a"),
        ([Message(role="user", parts=(PICTURE, "?"))], "(of type Image); give a picture as fovea_gym.types.ImageRef("),
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
    with pytest.raises(DataError, match=r"^train/0: mine\.py:C\.target returned the answer 3 \(of type int\); return"):
        returns(target=3).target(TASK)


ROW = {"data_source": "made", "extra_info": {"split": "train"}, "problem": "What is x?"}
ROW_TASK = Task(id="train/0", question="What is x?", answer="5", row=ROW)
GOLD, WRONG = r"So x is \boxed{5}.", r"So x is \boxed{6}."


def is_right(text: str, truth: str) -> float:
    return float(f"\\boxed{{{truth}}}" in text)


def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    assert (data_source, extra_info) == ("made", {"split": "train"})
    return is_right(solution_str, ground_truth)


def verl_of_more(data_source: str, solution_str: str, ground_truth: str, extra_info: Any, **kwargs: Any) -> Any:
    assert kwargs == {}
    right = is_right(solution_str, ground_truth)
    return {"score": 2 * right - 1, "acc": bool(right), "pred": solution_str, "details": None}


def verl_of_its_own(solution_str: str, ground_truth: str, method: str = "strict") -> float:
    return is_right(solution_str, ground_truth)


async def verl_async(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any, reward_router_address: str | None = None
) -> dict[str, Any]:
    return {"score": is_right(solution_str, ground_truth), "acc": is_right(solution_str, ground_truth)}


def verl_batch(
    data_sources: list[str], solution_strs: list[str], ground_truths: list[str], extra_infos: list[Any]
) -> list[float]:
    assert (data_sources, extra_infos) == (["made"], [{"split": "train"}])
    return [is_right(*each) for each in zip(solution_strs, ground_truths, strict=True)]


def verl_geo3k(predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1) -> float:
    return is_right(predict_str, ground_truth)


def easyr1(reward_input: dict[str, Any], format_weight: float = 0.5) -> dict[str, float]:
    right = is_right(reward_input["response"], reward_input["ground_truth"])
    return {"overall": right * (1 - format_weight), "format": 0.0, "accuracy": right}


def easyr1_batch(reward_inputs: list[dict[str, Any]], format_weight: float = 0.1) -> list[dict[str, float]]:
    assert isinstance(reward_inputs, list)
    return [easyr1(each, format_weight) for each in reward_inputs]


def easyr1_dapo(
    reward_inputs: Any,
    max_response_length: int = 8,
    overlong_buffer_length: int = 4,
    overlong_penalty_factor: float = 1,
) -> list[dict[str, float]]:
    """Its penalty of long answers, by the key that newer versions give."""
    scores = []
    for each in reward_inputs:
        over = each["response_length"] - (max_response_length - overlong_buffer_length)
        penalty = -min(max(over, 0) / overlong_buffer_length, 1.0)
        right = is_right(each["response"], each["ground_truth"])
        scores.append({"overall": right + penalty * overlong_penalty_factor, "accuracy": right, "overlong": penalty})
    return scores


def easyr1_before(predicts: list[str], ground_truths: list[str], format_weight: float = 0.1) -> list[dict[str, float]]:
    right = [is_right(*each) for each in zip(predicts, ground_truths, strict=True)]
    return [{"overall": each, "format": 0.0, "accuracy": each} for each in right]


def trl(prompts: list[str], completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    return [is_right(*each) for each in zip(completions, answer, strict=True)]


def ours(task: Task, text: str, _images: object) -> float:
    return is_right(text, task.answer)


def called(function: Callable[..., Any], task: Task, text: str) -> Any:
    returned = checked_reward(function, "file.py:compute_score")(task, text, [])
    return wait_for(returned) if function is verl_async else returned  # type: ignore[arg-type]


@table(
    ("function", "gold", "wrong", "parts"),
    [
        (verl, 1, 0, {}),
        (verl_of_more, 1, -1, {"acc": 1, "accuracy": 1}),
        (verl_of_its_own, 1, 0, {}),
        (verl_async, 1, 0, {"acc": 1, "accuracy": 1}),
        (verl_batch, 1, 0, {}),
        (verl_geo3k, 1, 0, {}),
        (easyr1, 0.5, 0, {"format": 0, "accuracy": 1}),
        (easyr1_batch, 0.9, 0, {"format": 0, "accuracy": 1}),
        (easyr1_dapo, 0.75, -0.25, {"accuracy": 1, "overlong_part": -0.25}),
        (easyr1_before, 1, 0, {"format": 0, "accuracy": 1}),
        (trl, 1, 0, {}),
        (ours, 1, 0, {}),
    ],
)
def test_a_published_signature_rewards_the_gold_answer(
    function: Callable[..., Any], gold: float, wrong: float, parts: dict[str, float]
) -> None:
    right, other = (score_of(called(function, ROW_TASK, text), num_images=0) for text in (GOLD, WRONG))
    assert (right.reward, right.accuracy, right.parts) == (gold, gold if not parts else 1, parts)
    assert (other.reward, other.accuracy) == (wrong, 0)


@table(
    ("num_tokens", "overlong"),
    [(4, 0), (6, -0.5), (8, -1), (100, -1), (None, -0.25)],  # 19 bytes are 5 tokens where nobody has counted them
)
def test_easyr1_gets_the_length_of_the_answer_in_tokens(num_tokens: int | None, overlong: float) -> None:
    grade = score_function(checked_reward(easyr1_dapo, "file.py:compute_score"), default_opener())
    score = score_of(grade(ROW_TASK, [Turn(messages=(), text=GOLD, num_tokens=num_tokens)]), num_images=0)
    assert (score.reward, dict(score.parts)["overlong_part"]) == (1 + overlong, overlong)


def test_a_column_that_a_row_lacks_is_named_where_the_function_requires_it() -> None:
    def optional(solution_str: str, ground_truth: str, data_source: str = "mine", extra_info: object = 7) -> float:
        assert (data_source, extra_info) == ("mine", 7)
        return 1.0

    task = replace(ROW_TASK, row={"problem": "What is x?"})
    assert called(optional, task, GOLD) == 1
    assert called(optional, replace(ROW_TASK, row={"data_source": "mine", "extra_info": 7}), GOLD) == 1
    for function, column in (
        (verl, "data_source"),
        (verl_batch, "data_source"),
        (lambda solution_str, ground_truth, extra_info: 1.0, "extra_info"),
        (trl, "answer_of_mine"),
    ):
        given = (lambda completions, answer_of_mine: [1.0]) if function is trl else function
        with pytest.raises(ValueError, match=rf"the row has no column {column}, which the reward function requires as"):
            called(given, task, GOLD)


def names(task: Any, text: Any, images: Any) -> float:
    """1 where each argument is what its name says."""
    return float((task, text, images) == (ROW_TASK, GOLD, []))


@table(
    "function",
    [
        lambda images, task, text: names(task, text, images),
        lambda text, images, _task: names(_task, text, images),
        lambda images, text, task, weight=1.0: weight * names(task, text, images),
        lambda weight=1.0, task=None, text=None, images=None: weight * names(task, text, images),
        lambda images, text, task, *rest, **more: names(task, text, images),
        lambda *, images, text, task: names(task, text, images),
        lambda *, task, text, images: names(task, text, images),
        partial(lambda weight, images, text, task: weight * names(task, text, images), 1.0),
        names,
        lambda *arguments: names(*arguments[:2], *arguments[2:]),
    ],
)
def test_own_names_are_given_by_name_in_any_order(function: Callable[..., Any]) -> None:
    assert called(function, ROW_TASK, GOLD) == 1


def test_own_names_of_a_coroutine_are_given_by_name() -> None:
    async def names_async(images: Any, task: Any, text: Any) -> float:
        return names(task, text, images)

    assert wait_for(checked_reward(names_async, "file.py:names_async")(ROW_TASK, GOLD, [])) == 1  # type: ignore[arg-type]


@table(
    "function",
    [lambda text, task, *rest: 0, lambda images, *rest: 0, lambda task, images, more=1: 0, lambda a=0, task=1, c=2: 0],
)
def test_own_names_at_places_of_others_are_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="where it is given the"):
        checked_reward(function, "file.py:reward")


def test_a_mapping_without_a_reward_is_named() -> None:
    with pytest.raises(ValueError, match=r"without `score` \(verl\) or `overall` \(EasyR1\)"):
        called(lambda solution_str, ground_truth: {"acc": 1.0}, ROW_TASK, GOLD)
    with pytest.raises(ValueError, match="for one completion; return a list of one reward"):
        called(lambda reward_inputs: {"overall": 1.0}, ROW_TASK, GOLD)


@table(
    ("function", "unknown"),
    [
        (lambda reward_inputs, max_response_length: [], "max_response_length"),
        (lambda data_source, solution_str, ground_truth, extra_info, tokenizer: 0, "tokenizer"),
        (lambda data_source, response, ground_truth: 0, "data_source"),
        (lambda answer: 0, "answer"),
        (lambda task, answer, images: 0, "answer"),
    ],
)
def test_an_unknown_required_parameter_is_refused_with_the_accepted_forms(
    function: Callable[..., Any], unknown: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        checked_reward(function, "file.py:compute_score")
    assert f"reward=file.py:compute_score needs `{unknown}`" in str(refused.value)
    for form in ("(task, text, images)", "(completions, **columns)", "data_source, solution_str", "reward_i"):
        assert form in str(refused.value)


@table(
    "function",
    [
        lambda task, text, images, response_length=None: response_length,
        lambda images, text, task, response_length=None: response_length,
        lambda task, text, images, response_length: response_length,
        lambda response_length, _images, text, _task: response_length,
    ],
)
def test_a_function_of_ours_gets_the_length_of_the_answer_by_name(function: Callable[..., Any]) -> None:
    reward = checked_reward(function, "file.py:reward")
    assert takes_length(reward)
    assert reward(ROW_TASK, GOLD, [], response_length=7) == 7
    assert reward(ROW_TASK, "x" * 40, []) == 10, "an estimate, where nobody has counted"
