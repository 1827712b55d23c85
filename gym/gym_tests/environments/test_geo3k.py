"""Geometry3K: both public layouts, marks and images in step, rewards by formula, one line for a bad row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pydantic import ValidationError

from fovea_gym.environments.base import Environment, Split
from fovea_gym.environments.geo3k import Geo3k
from fovea_gym.errors import BadRowError, DataError
from fovea_gym.graders.boxed_answer import grade
from fovea_gym.rows.access import RowAccess
from fovea_gym.rows.tasks import kinds_of
from fovea_gym.settings.environments import Geo3kEnvironment
from fovea_gym.types import ImageRef, Task
from gym_tests.environments.files import files
from gym_tests.grading import scored
from gym_tests.images import encoded, from_array
from gym_tests.tables import table

SHARED = Path(__file__).parents[4] / "shared" / "data" / "geo3k"
VERL = {"prompt_key": "prompt", "answer_key": "reward_model"}
NATIVE = "<|vision_start|><|image_pad|><|vision_end|>"
"""In rows that hold the text of a rendered prompt."""


IMAGES = [{"bytes": encoded(Image.new("L", (8, 8), grey)), "path": None} for grey in range(2)]


def row(problem: object = "<image>Find x.", answer: object = "12", num_images: int = 1) -> dict[str, object]:
    return {"images": IMAGES[:num_images], "problem": problem, "answer": answer}


def geo3k(folder: Path, rows: list[dict[str, object]], **settings: object) -> Geo3k:
    config = files(folder, rows, **{"dev_share": 0, **settings})
    return Geo3k(Geo3kEnvironment.model_validate(config), RowAccess())


def parts_of(environment: Environment, task: Task) -> list[tuple[str, list[str]]]:
    """Roles and parts, with an image written as its number."""
    names = {id(ref): f"#{number}" for number, ref in enumerate(task.images, start=1)}
    return [
        (message.role, [names[id(part)] if isinstance(part, ImageRef) else part for part in message.parts])
        for message in environment.prompt(task)
    ]


@table(
    ("problem", "num_images", "parts"),
    [
        ("<image>Find x.", 1, ["#1", "Find x."]),
        ("See <image> and\r\n<image>.", 2, ["See ", "#1", " and\r\n", "#2", "."]),
        ("Find x.", 2, ["#1", "#2", "Find x."]),
        ("Find x <image><image>", 2, ["Find x ", "#1", "#2"]),
        ("What is 2 + 2?", 0, ["What is 2 + 2?"]),
        (f"Compare {NATIVE} with {NATIVE}.", 2, ["Compare ", "#1", " with ", "#2", "."]),
        ([{"role": "user", "content": f"{NATIVE}Which?"}], 1, ["#1", "Which?"]),
    ],
)
def test_images_go_where_their_marks_are(problem: object, num_images: int, parts: list[str], tmp_path: Path) -> None:
    environment = geo3k(tmp_path, [row(problem, num_images=num_images)])
    (task,) = environment.tasks("test")
    assert parts_of(environment, task) == [("user", parts)]
    assert isinstance(problem, list) or task.question == problem.replace(NATIVE, "<image>")
    assert task.id == "test/0"


def test_verl_layout(tmp_path: Path) -> None:
    chat = [("system", "Rules."), ("user", "<image>One?"), ("assistant", "1"), ("user", "Two <image>?")]
    verl = {
        "images": IMAGES,
        "prompt": [{"role": role, "content": content} for role, content in chat],
        "reward_model": {"style": "rule", "ground_truth": r"\boxed{\frac{1}{2}}"},
    }
    environment = geo3k(tmp_path, [verl], **VERL)
    (task,) = environment.tasks("test")
    assert parts_of(environment, task) == [
        ("system", ["Rules."]),
        ("user", ["#1", "One?"]),
        ("assistant", ["1"]),
        ("user", ["Two ", "#2", "?"]),
    ]
    assert task.answer == r"\frac{1}{2}"
    assert task.row["reward_model"] == verl["reward_model"]
    with pytest.raises(DataError, match=r"row 0: .*\bsystem_prompt\b"):
        geo3k(tmp_path, [verl], system_prompt="Be brief.", **VERL).tasks("test")[0]


def test_several_image_columns_and_paths_beside_the_file(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4), (1, 2, 3)).save(tmp_path / "b.png")
    cells = {"problem": "<image> or <image>?", "answer": "1", "one": IMAGES[0], "two": "b.png"}
    environment = geo3k(tmp_path, [cells], image_keys=("one", "two"))
    (task,) = environment.tasks("test")
    assert [ref.where for ref in task.images] == [f"rows.parquet row 0, image {n}" for n in (1, 2)]
    assert from_array(task.images[1]).getpixel((0, 0)) == (1, 2, 3)


def test_dev_has_rows_of_its_own(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([row(answer="7"), row(answer="8")]), tmp_path / "validation.parquet")
    rows = [row(answer=str(n)) for n in range(5)]
    environment = geo3k(tmp_path, rows, dev_files=(str(tmp_path / "validation.parquet"),))
    assert [task.answer for task in environment.tasks("test")] == list("01234")
    assert [(task.id, task.answer) for task in environment.tasks("dev")] == [("dev/0", "7"), ("dev/1", "8")]
    assert list(kinds_of(environment.tasks("dev"))) == ["all"] * 2
    assert len(environment.tasks("train")) == 5


THINK = {"think_tags": True}
TAGS = {"think_tags": True, "answer_tags": True, "format_weight": 0.5}


@table(
    ("settings", "text", "accuracy", "formatted"),
    [
        ({}, r"so \boxed{x = 12.0}", 1, 1),
        ({}, r"\boxed{11}, no, \boxed{12}", 1, 1),
        ({}, r"\boxed{12}, no, \boxed{11}", 0, 1),
        *(({}, r"\boxed{}", 0, 1), ({}, r"12", 0, 0), ({}, r"\boxed{12", 0, 0)),
        ({"format_weight": 1.0}, r"\boxed{13}", 0, 1),
        (THINK, r"<think>6 + 6</think> \boxed{12}", 1, 1),
        (THINK, r" <think>6 + 6</think>\boxed{13}", 0, 1),
        (THINK, r"6 + 6</think> \boxed{12}", 1, 1),  # the chat template has written the opening tag
        (THINK, r"\boxed{12}", 1, 0),
        *((THINK, text, 1, 0) for text in (r"<think>\boxed{12}</think>", r"<think></think>\boxed{12}")),
        *((THINK, rf"<think>6{tags}<think>6</think>\boxed{{12}}", 1, 0) for tags in ("</think>", " ")),
        (THINK, r"<think>6 + 6</think> 12", 0, 0),
        (TAGS, "<think>6 + 6</think> <answer> 12 </answer>", 1, 1),
        (TAGS, "<think>6 + 6</think><answer>13</answer>", 0, 1),
        (TAGS, "<answer>13</answer> no, <answer>12</answer>", 1, 0),
        *((TAGS, f"<think>6 + 6</think> {answer}", 0, 0) for answer in (r"\boxed{12}", "<answer>12")),
    ],
)
def test_the_reward_weighs_accuracy_and_form(
    settings: dict[str, Any], text: str, accuracy: float, formatted: float, tmp_path: Path
) -> None:
    truth = "<answer> 12 </answer>" if settings is TAGS else "12"  # as in R1-V's rows
    environment, weight = geo3k(tmp_path, [row(answer=truth)], **settings), settings.get("format_weight", 0.1)
    (task,) = environment.tasks("test")
    score = scored(environment.graders, task, text)
    assert score.parts == {"answer": accuracy, "format": formatted}
    assert (score.accuracy, score.reward) == (accuracy, (1 - weight) * accuracy + weight * formatted)
    assert scored(environment.graders, task, environment.target(task)).reward == 1


@table(
    ("settings", "right", "wrong"),
    [
        ({}, 1.0, 0.1),
        ({"format_weight": 0}, 1.0, 0.0),
        ({"reward_max_val": 1, "reward_min_val": 0}, 1.0, 0.0),
        ({"reward_max_val": 5}, 5.0, 0.0),
        ({"reward_min_val": -1, "format_weight": 0}, 1.0, -1.0),
    ],
)
def test_both_public_rewards(settings: dict[str, object], right: float, wrong: float, tmp_path: Path) -> None:
    environment = geo3k(tmp_path, [row()], **settings)
    (task,) = environment.tasks("test")
    scores = [scored(environment.graders, task, text) for text in (r"\boxed{12}", r"\boxed{13}")]
    assert [(score.reward, score.accuracy) for score in scores] == [(right, 1), (wrong, 0)]


@table(
    ("settings", "problem"),
    [
        ({"reward_max_val": 1, "format_weight": 0.1}, r"\bformat_weight=0\.1\b"),
        ({"reward_min_val": 0, "think_tags": True}, r"\bthink_tags=true\b"),
        ({"reward_max_val": 1, "reward_min_val": 1}, r"\breward_min_val=1\b.*\breward_max_val=1\b"),
        ({"reward_min_val": 2}, r"\breward_min_val=2\b.*\breward_max_val=1\b"),
    ],
)
def test_rewards_that_contradict_each_other_are_refused(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        Geo3kEnvironment.model_validate({"train_files": ["a"], "test_files": ["a"], **settings})


def test_a_grade_says_why() -> None:
    reasons = ("boxed '6+6' equals '12'", "boxed '13' is not '12'", r"no \boxed{} that closes")
    assert tuple(grade(text, "12").reason for text in (r"\boxed{6+6}", r"\boxed{13}", "12")) == reasons


@table(
    ("settings", "message"),
    [
        ({"prompt_key": "question"}, "prompt_key: rows.parquet has no column 'question'; its columns"),
        ({"answer_key": "answers"}, "set answer_key=answer"),
        ({"image_keys": ("image",)}, "set image_keys=images"),
        ({"test_files": ("tset.parquet",)}, "test_files: no such file tset.parquet"),
    ],
)
def test_settings_that_do_not_fit_the_file(settings: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        geo3k(tmp_path, [row()], **settings).tasks("test")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("train", "test", "num_rows"),
    [
        ("fixture_train.parquet", "fixture_test.parquet", (64, 32)),
        ("fixture_verl_train.parquet", "fixture_verl_test.parquet", (64, 32)),
        ("train.parquet", "validation.parquet", (2101, 300)),
    ],
)
def test_gold_answers_of_the_real_data_score_full_marks(train: str, test: str, num_rows: tuple[int, int]) -> None:
    config = {"train_files": (str(SHARED / train),), "test_files": (str(SHARED / test),), "dev_share": 0}
    if not all((SHARED / name).exists() for name in (train, test)):
        pytest.skip(f"the shared Geometry3K files are not here ({SHARED})")
    environment = Geo3k(Geo3kEnvironment.model_validate(config), RowAccess())
    splits: tuple[Split, ...] = ("train", "test")
    for split, expected in zip(splits, num_rows, strict=True):
        tasks = environment.tasks(split)
        assert len(tasks) == expected
        for task in tasks:
            messages = tuple(environment.prompt(task))
            assert sum(isinstance(part, ImageRef) for part in messages[-1].parts) == len(task.images) == 1
            score = scored(environment.graders, task, environment.target(task), messages)
            assert (score.reward, score.accuracy) == (1.0, 1.0), task.id


def test_any_of_several_gold_answers_is_right(tmp_path: Path) -> None:
    several = [r"\boxed{12}", r"3 \sqrt{2}"]
    for rows, settings in (
        ([row(answer=several), row(answer=["7"])], {}),
        ([{**row(), "reward_model": {"ground_truth": several}}] * 2, {"answer_key": "reward_model"}),
    ):
        environment = geo3k(tmp_path, rows, **settings)
        task = environment.tasks("test")[0]
        assert task.answer == "12"
        given = [r"\boxed{12.0}", r"\boxed{\sqrt{18}}", r"\boxed{12, 3\sqrt{2}}", r"\boxed{13}"]
        assert [scored(environment.graders, task, text).accuracy for text in given] == [1, 1, 0, 0]
    with pytest.raises(BadRowError, match=r"\blist\b"):
        geo3k(tmp_path, [row(answer=[["12"]])]).tasks("test")[0]
    with pytest.raises(BadRowError, match="wrong even when it is given word for word"):
        geo3k(tmp_path, [row(answer=["12", "$"])]).tasks("test")[0]


@table("truth", ["$", "degrees", "{5", "5}", "\N{ZERO WIDTH SPACE}", r"\text{}", r"\boxed{5"])
def test_an_answer_that_is_wrong_word_for_word_is_a_bad_row(tmp_path: Path, truth: str) -> None:
    tasks = geo3k(tmp_path, [row(), row(answer=truth)]).tasks("test")
    problem = r"^rows\.parquet row 1: the answer .* is wrong even when it is given word for word"
    with pytest.raises(BadRowError, match=problem) as caught:
        [tasks[index] for index in range(len(tasks))]
    assert caught.value.reason == "answer_never_right"


@table(
    "truth",
    ["$5$", r"\$5", "5 degrees", "5\N{DEGREE SIGN}", "5\N{ZERO WIDTH SPACE}", "\N{SOFT HYPHEN}5", "\u20605", "5 cm"],
)
def test_units_dollars_and_invisible_characters_are_no_part_of_an_answer(truth: str) -> None:
    assert grade(r"\boxed{5}", truth).score == grade(rf"\boxed{{{truth}}}", truth).score == 1
