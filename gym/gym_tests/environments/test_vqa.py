"""The environment `vqa`, and its answers: how they are found, spelled and compared; annotators, options, hedges."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import permutations, product
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fovea_gym.environments.vqa import Vqa
from fovea_gym.errors import BadRowError, DataError
from fovea_gym.graders.vqa_answer import grade
from fovea_gym.graders.vqa_claim import soft_accuracy
from fovea_gym.graders.vqa_words import listed_options, options_of, picked_letter, same_words, spelled, true_letter
from fovea_gym.rows.access import RowAccess
from fovea_gym.rows.tasks import levels_of
from fovea_gym.settings.environments import VqaEnvironment
from fovea_gym.types import ImageRef
from gym_tests.environments.files import files, row
from gym_tests.graders.hedges import CONNECTIVES, check_constants
from gym_tests.grading import scored, within_a_second
from gym_tests.tables import table


def vqa(folder: Path, rows: list[dict[str, object]], **settings: object) -> Vqa:
    return Vqa(VqaEnvironment.model_validate({"name": "vqa", **files(folder, rows, **settings)}), RowAccess())


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
    rewards = [scored(environment.graders, task, text).reward for text in ("Red", "maroon", "brown", "blue")]
    assert rewards == pytest.approx([1.0, 0.9, 0.3, 0.0])
    assert [scored(environment.graders, single, text).accuracy for text in ("blue", "red")] == [1, 0]
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
    assert [scored(environment.graders, task, text).reward for text in texts] == [1, 1, 1, 1, 0, 0, 0]
    environment = vqa(tmp_path, [row("Which?", "pink", choices=["red", "blue"])], choices_key="choices")
    with pytest.raises(BadRowError, match=r"test/0: .*'pink'") as caught:
        environment.prompt(environment.tasks("test")[0])
    assert caught.value.reason == "answer_no_option"


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"\banswers_key=a\b.*\bchoices_key=c\b"):
        VqaEnvironment(train_files=("a",), test_files=("a",), answers_key="a", choices_key="c")


@table("truth", ["?", "...", "\N{ZERO WIDTH SPACE}", "{", ":)"])
def test_a_wrong_truth(tmp_path: Path, truth: str) -> None:
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


OWN = [
    json.loads(line) for line in Path(__file__).with_name("vqa_cases.jsonl").read_text(encoding="utf-8").splitlines()
]
SHARED = Path(__file__).parents[4] / "shared" / "data" / "cases" / "vqa_cases_sample.jsonl"
SHARED_ROWS = SHARED.parents[1] / "vqa"
OPTIONS = ("cat", "dog", "red car", "4")


@table("case", OWN)
def test_right_and_wrong_answers(case: dict[str, list[str]]) -> None:
    truth = str(case["truth"])
    assert [answer for answer in case["right"] if grade(answer, truth).score != 1] == []
    assert [answer for answer in case["wrong"] if grade(answer, truth).score != 0] == []


def test_shared_cases() -> None:
    if not SHARED.exists():
        pytest.skip(f"the shared VQA cases are not here ({SHARED})")
    cases = [json.loads(line) for line in SHARED.read_text(encoding="utf-8").splitlines()]
    scores = [grade(case["prediction"], case.get("answers", case["truth"])).score for case in cases]
    assert scores == pytest.approx([case["expected"] for case in cases])


@table(
    ("text", "words"),
    [
        *(("The Two  Dogs!", "2 dogs"), ("twenty-one", "21"), ("two three", "2 3"), ("none", "0"), ("!?", "")),
        *(
            ("1,234,567.50", "1234567.50"),
            ("1,23", "1 23"),
            ("-3", "-3"),
            ("2-3", "2-3"),
            ("U.S.A.", "usa"),
            ("a", "a"),
        ),
        *(("don\N{RIGHT SINGLE QUOTATION MARK}t", "dont"), ("an apple", "apple"), ("red/white", "red white")),
    ],
)
def test_spelling(text: str, words: str) -> None:
    assert spelled(text) == words


@table(
    ("answer", "truths", "accuracy"),
    [
        ("2", ["2"] + ["3"] * 9, 0.3),  # 9 subsets of 10 hold it: 9 * (1/3) / 10
        ("2", ["2"] * 2 + ["3"] * 8, 0.6),  # 2 * (1/3) + 8 * (2/3), over 10
        ("2", ["2"] * 3 + ["3"] * 7, 0.9),  # 3 * (2/3) + 7 * 1, over 10
        ("2", ["2"] * 4 + ["3"] * 6, 1.0),
        ("5", ["2"] * 4 + ["3"] * 6, 0.0),
        ("two", ["2", "Two.", "two", "3"], (3 * 2 / 3 + 1) / 4),
        ("2", ["2", "2", "2"], 1.0),  # of three, both others agree
        ("2", ["2", "3"], 0.5),
        ("2", ["2"], 1.0),
        ("2", [], 0.0),
    ],
)
def test_soft_accuracy(answer: str, truths: list[str], accuracy: float) -> None:
    assert soft_accuracy(answer, truths) == pytest.approx(accuracy)


RIGHT = [*("B", "b", "(B)", "B.", "B)", "B. dog", "(B) dog", "B: dog", "Option B", "The answer is B.", "Answer: B")]
RIGHT += [r"\boxed{B}", r"\boxed{\text{B}}", "dog", "A dog", "**B**", "choice (b)", "B because it barks", "B) Dog."]
WRONG = [*("A", "A or B", "B or C", "B, C", "cat", "B. cat", "", "AB", "dogs", "BB", "E", "(A)", "cat dog", "Bdog")]
WRONG += ["A, B, C, D", "None", "B and D", "C. dog", "both A and B", "not B"]


def test_options_are_picked_by_letter_or_text() -> None:
    assert [answer for answer in RIGHT if grade(answer, "B", options=OPTIONS).score != 1] == []
    assert [answer for answer in WRONG if grade(answer, "B", options=OPTIONS).score != 0] == []
    # without the options their letters still are
    assert grade("(b)", "B").score == grade("B. dog", "B").score == 1
    assert grade("A dog", "A").score == 0
    assert picked_letter("dog", ("dog", "the dog")) is None


@table(
    ("cell", "options"),
    [
        ({"A": "cat", "B": 4}, ("cat", "4")),
        ({"B": "dog", "(a)": "cat"}, ("cat", "dog")),
        ({"A": "cat", "B": "dog", "C": None, "D": None}, ("cat", "dog")),
        (["cat", "dog", math.nan, " "], ("cat", "dog")),
        *((cell, "not a list of 2 to 26 texts") for cell in (None, ["one"], "cat", ["x"] * 27, ["cat", None, None])),
        # an answer `1` could be the first or, from 0, the second
        ({"1": "cat", "2": "dog"}, r"the options have the keys \['1', '2'\], not the letters from A on"),
        ({"A": "cat", "C": "dog"}, "the options have the keys"),
        (["cat", None, "dog"], "one of the options .* is empty or appears twice"),
        (["red", " red "], "one of the options .* is empty or appears twice"),
    ],
)
def test_options_of_a_row(cell: object, options: tuple[str, ...] | str) -> None:
    if isinstance(options, tuple):
        assert options_of(cell, "row 1") == options
        return
    with pytest.raises(BadRowError, match=f"^row 1: .*{options}") as caught:
        options_of(cell, "row 1")
    assert caught.value.reason == "options"


def test_the_true_option_is_a_letter() -> None:
    assert listed_options(("cat", "dog")) == "A. cat\nB. dog"
    assert [true_letter(answer, OPTIONS, "row 1") for answer in ("red car", "c", "(C)", "2", "4")] == [*"CCCC", "D"]
    for answer in ("E", "7", "bird", ""):
        with pytest.raises(BadRowError, match=r"row 1: the answer .* is not one of the 4 options"):
            true_letter(answer, OPTIONS, "row 1")


def test_numbers_are_compared_digit_by_digit_and_with_the_things_that_the_truth_names() -> None:
    assert same_words("12345678901234567", "12345678901234567.0")
    assert not same_words("12345678901234567", "12345678901234568")
    assert [grade(answer, "5 feet").score for answer in ("5 inches", "5", "4 feet")] == [0, 0, 0]


PIECES = st.sampled_from([*"3-,. }'", "yes", "no", "the", "\\boxed{", "twenty", "A)", "or", "answer:"])
TEXTS = st.one_of(st.text(max_size=80), st.lists(PIECES, max_size=20).map("".join))


def check_any_answer(text: str, truth: str) -> None:
    assert 0 <= grade(text, truth).score <= 1
    assert 0 <= grade(text, [truth, "3", "yes"]).score <= 1
    assert 0 <= grade(text, "B", options=OPTIONS).score <= 1
    assert (soft_accuracy(truth, [truth]) == 1) == (spelled(truth) != "")


@settings(max_examples=300, deadline=None)
@given(TEXTS, TEXTS)
def test_any_answer_is_graded(text: str, truth: str) -> None:
    check_any_answer(text, truth)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(TEXTS, min_size=20, max_size=20), TEXTS)
def test_twenty_thousand_answers_are_graded_in_time(texts: list[str], truth: str) -> None:
    for text in texts:
        within_a_second(lambda text=text: check_any_answer(text, truth))


@table("part", ["a", "1,", "the ", "'", "-", "(", "answer is ", "<answer>", "yes ", "is ", ".", "\\boxed{"])
def test_long_answers_end_quickly(part: str) -> None:
    text = part * (200_000 // len(part))
    assert grade(text, "3").score == 0


# one answer counts for one value: no hedge is right for two truths, no contradiction is right, sentences are
TRUTHS = [
    *("yes", "no", "0", "1", "2", "3", "6", "9", "12", "-5", "2.5", "50%", "10:30", "$5", "red", "blue", "gray"),
    *("usa", "night", "dog", "left", "right", "circle", "triangle", "bus stop", "red car", "wooden table", "frisbee"),
    *("red and white", "nothing", "many", "tshirt", "don't know", "A", "B", "C", "D"),
]
OPENINGS = [
    *("", "the ", "a ", "it is ", "It's ", "there are ", "there is ", "yes ", "no ", "Yes, ", "No, ", "not ", "I see "),
    *("I think ", "The car is ", "maybe ", "either ", "Answer: ", "The answer is ", "option ", "<answer>", r"\boxed{"),
]


def right_for(answer: str, truths: Sequence[str] = TRUTHS) -> list[str]:
    return [truth for truth in truths if grade(answer, truth).score > 0]


def test_every_truth_is_right_for_itself_alone() -> None:
    assert [right_for(truth) for truth in TRUTHS] == [[truth] for truth in TRUTHS]


def test_no_pair_of_answers_is_right_for_two_truths() -> None:
    truths = ("yes", "no", "0", "2", "red", "night", "A")
    openings = ("", "yes ", "it is ", "the ")
    parts = product(openings, permutations(truths, 2), CONNECTIVES)
    answers = [f"{opening}{one}{connective}{other}" for opening, (one, other), connective in parts]
    assert [answer for answer in answers if len(right_for(answer, truths)) > 1] == []


ENDS = st.sampled_from([*CONNECTIVES, "", ".", "}", "</answer>"])


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(OPENINGS), st.lists(st.tuples(st.sampled_from(TRUTHS), ENDS), max_size=5))
def test_no_hedge_is_right_for_two_truths(opening: str, parts: list[tuple[str, str]]) -> None:
    answer = opening + "".join(truth + connective for truth, connective in parts)
    assert len(right_for(answer)) <= 1, right_for(answer)


@pytest.mark.parametrize("name", ["nlvr_vqa_train", "fixture_train"])
def test_no_blind_hedge_beats_the_best_blind_answer_on_real_rows(name: str) -> None:
    file = SHARED_ROWS / f"{name}.parquet"
    if not file.exists():
        pytest.skip(f"the shared VQA rows are not here ({SHARED_ROWS})")
    check_constants([str(answer) for answer in pq.read_table(file, columns=["answer"])["answer"].to_pylist()])


OTHER_NUMBERS = [
    *("3 k", "3 tens", "3 squared", "3 pairs", "three quarters", "three fifths", "3 cubed", "3 thirds", "3 twentieths"),
    *("3 couples", "3 scores", "3 lakh", "3 bn", "3 mil", "3 grand", "3 pi", "3 π", "3 x", "3 ‰", "3 factorial"),
    *("3 tripled", "3 halves", "3 quarter", "3 twos", "3 rd", "3 twice", "3 each", "3 per row", "3 dogs on each side"),
    *("3 too many", "There are 3 pairs of shoes", "I see 3 full tens", "It is 3 squared.", "The total is 3 k."),
    *("Exactly three quarters of the dogs", "3 trios in the picture", "3 raised to the 4th"),
    *("3 doubles", "3 zillion", "3 mega", "3 max", "3 below", "3 percentage points", "3 short", "3 square"),
]


@table("answer", OTHER_NUMBERS)
def test_a_word_that_makes_another_number_is_not_that_number(answer: str) -> None:
    assert grade(answer, "3").score == 0
    assert grade(answer, answer).score == 1


THINGS = [
    *("3 dogs", "3 squares", "3 cubes", "3 raised hands", "3 of them", "three grand pianos", "3 meters", "3 red ones"),
    *("There are 3 cats on the second shelf.", "3 divided windows", "the number of pairs is 3"),
    *("3 below the table", "3 short people", "There are 3 square tables"),
]


def test_things_behind_a_number_leave_it() -> None:
    assert [answer for answer in THINGS if grade(answer, "3").score != 1] == []


DENIED = [
    *("correct, there is none", "Yes, there are zero dogs.", "true, I have none", "Yes, it lacks a dog"),
    *("yep, we got 0", "Correct, there are none of them", "yes, there is nil", "Yes, they carry none"),
    *("yes, theres 0", "yes, I disagree"),
]


def test_a_yes_that_counts_none_is_no_yes_and_a_no_that_does_is_a_no() -> None:
    assert [answer for answer in DENIED if grade(answer, "yes").score or grade(answer, "no").score] == []
    for answer in ("No, there are none.", "No, I see 0 dogs", "no, there is nothing"):
        assert grade(answer, "no").score == 1, answer
    assert grade("Yes, the score is 0.", "yes").score == 1
