"""The environment `vqa`: rows of all question types, several annotators, options."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from fovea_gym.environments.vqa import Vqa, grade
from fovea_gym.errors import BadRowError, DataError
from fovea_gym.rows.access import RowAccess
from fovea_gym.rows.tasks import levels_of
from fovea_gym.settings.environments import VqaEnvironment
from fovea_gym.types import ImageRef, Score, Task
from gym_tests.environments.files import files, row
from gym_tests.grading import scored
from gym_tests.tables import table


def vqa(folder: Path, rows: list[dict[str, object]], **settings: object) -> Vqa:
    return Vqa(VqaEnvironment.model_validate({"name": "vqa", **files(folder, rows, **settings)}), RowAccess())


def score(environment: Vqa, task: Task, text: str) -> Score:
    return scored(environment.graders, task, text)


def test_a_column_of_levels_is_what_a_curriculum_draws_by(tmp_path: Path) -> None:
    rows = [row("Is it red?", "yes", level=level) for level in ("easy", "hard", None)]
    assert levels_of(vqa(tmp_path, rows, level_key="level").tasks("test")) == ["easy", "hard", "all"]
    assert levels_of(vqa(tmp_path, rows).tasks("test")) is None
    with pytest.raises(DataError, match=r"^level_key"):
        vqa(tmp_path, rows, level_key="depth").tasks("test")


def test_answers_of_several_annotators(tmp_path: Path) -> None:
    answers = [{"answer": answer, "answer_id": n} for n, answer in enumerate(["red"] * 6 + ["maroon"] * 3 + ["brown"])]
    rows = [row("What colour?", "red", answers=answers), row("What colour?", "blue", answers=[])]
    environment = vqa(tmp_path, rows, answers_key="answers")
    task, single = environment.tasks("test")
    assert (task.answer, environment.target(task)) == ("red", r"\boxed{red}")
    rewards = [score(environment, task, text).reward for text in ("Red", "maroon", "brown", "blue")]
    assert rewards == pytest.approx([1.0, 0.9, 0.3, 0.0])
    assert [score(environment, single, text).accuracy for text in ("blue", "red")] == [1, 0]
    assert vqa(tmp_path, [row("What colour?", ["a", "b", "b"])]).tasks("test")[0].answer == "b", "the majority's"


def test_options_stand_under_the_question_and_one_letter_is_right(tmp_path: Path) -> None:
    rows = [row("Which colour?", "blue", choices=["red", "blue"]), row("Which colour?", "A", choices=["red", "blue"])]
    environment = vqa(tmp_path, rows, choices_key="choices")
    task, by_letter = environment.tasks("test")
    (message,) = environment.prompt(task)
    assert isinstance(message.parts[0], ImageRef)
    assert message.parts[1:] == ("Which colour?\nA. red\nB. blue",)
    assert [environment.target(one) for one in (task, by_letter)] == [r"\boxed{B}", r"\boxed{A}"]
    texts = ("B", "(b)", "blue", r"\boxed{B}", "A", "red", "A or B")
    assert [score(environment, task, text).reward for text in texts] == [1, 1, 1, 1, 0, 0, 0]


def test_an_answer_that_is_no_option_is_a_bad_row(tmp_path: Path) -> None:
    environment = vqa(tmp_path, [row("Which?", "pink", choices=["red", "blue"])], choices_key="choices")
    with pytest.raises(BadRowError, match=r"test/0: .*'pink'") as caught:
        environment.prompt(environment.tasks("test")[0])
    assert caught.value.reason == "answer_no_option"


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"\banswers_key=a\b.*\bchoices_key=c\b"):
        VqaEnvironment(train_files=("a",), test_files=("a",), answers_key="a", choices_key="c")


@table("truth", ["?", "...", "\N{ZERO WIDTH SPACE}", "{", ":)"])
def test_an_answer_that_is_wrong_word_for_word_is_a_bad_row(tmp_path: Path, truth: str) -> None:
    tasks = vqa(tmp_path, [row("What?", truth)]).tasks("test")
    with pytest.raises(BadRowError, match=r"row 0: the answer .* is wrong even when it is given word for wo") as caught:
        tasks[0]
    assert caught.value.reason == "answer_never_right"


def test_one_annotator_who_can_be_right_makes_a_row(tmp_path: Path) -> None:
    rows = [row("What?", "?", answers=["?", "red", "?"]), row("What?", "?", answers=["?", "..."])]
    tasks = vqa(tmp_path, rows, answers_key="answers").tasks("test")
    assert tasks[0].answer == "?"
    with pytest.raises(BadRowError, match="word for word"):
        tasks[1]


@table("truth", ["3\N{ZERO WIDTH SPACE}", "\N{SOFT HYPHEN}3", "$3$", "three.", "3\N{WORD JOINER}"])
def test_invisible_characters_and_dollars_are_no_part_of_an_answer(truth: str) -> None:
    assert grade("3", truth).score == grade(truth, "3").score == 1
