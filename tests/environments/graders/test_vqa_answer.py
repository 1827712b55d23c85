"""VQA's answers: how they are found, spelled and compared; several annotators; options."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fovea.environments.graders.vqa_claim import found_answer, soft_accuracy
from fovea.environments.graders.vqa_words import (
    listed_options,
    options_of,
    picked_letter,
    same_words,
    spelled,
    true_letter,
)
from fovea.environments.vqa import grade
from fovea.errors import BadRowError
from tests.grading import within_a_second
from tests.tables import table

OWN = [
    json.loads(line) for line in Path(__file__).with_name("vqa_cases.jsonl").read_text(encoding="utf-8").splitlines()
]
SHARED = Path(__file__).parents[4] / "shared" / "data" / "cases" / "vqa_cases_sample.jsonl"
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
    ("response", "answer"),
    [
        (r"first \boxed{2}, then \boxed{3}", "3"),
        (r"\boxed{\text{three}} is the answer", "three"),
        ("<answer>2</answer> no <answer>3</answer>", "3"),
        ("<think>Answer: 2</think> 3", "3"),
        ("I see dogs.\nAnswer: 3\nThat is all.", "3"),
        ("The answer is: **3**", "3**"),
        ("**Answer:**\n3", "3"),
        (" 3 \n", "3"),
        ("", ""),
    ],
)
def test_where_an_answer_is_found(response: str, answer: str) -> None:
    assert found_answer(response) == answer


@table(
    ("text", "words"),
    [
        ("The Two  Dogs!", "2 dogs"),
        ("twenty-one", "21"),
        ("two three", "2 3"),
        ("1,234,567.50", "1234567.50"),
        ("1,23", "1 23"),
        ("-3", "-3"),
        ("2-3", "2-3"),
        ("U.S.A.", "usa"),
        ("don\N{RIGHT SINGLE QUOTATION MARK}t", "dont"),
        ("a", "a"),
        ("an apple", "apple"),
        ("none", "0"),
        ("red/white", "red white"),
        ("!?", ""),
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
        (["cat", None, "dog"], "one is empty or there twice"),
        (["red", " red "], "one is empty or there twice"),
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
        with pytest.raises(BadRowError, match=r"row 1: the answer .* is none of the 4 options"):
            true_letter(answer, OPTIONS, "row 1")


def test_long_numbers_are_compared_digit_by_digit() -> None:
    assert same_words("12345678901234567", "12345678901234567.0")
    assert not same_words("12345678901234567", "12345678901234568")


PIECES = st.sampled_from(
    ["yes", "no", "3", "-", ",", ".", "the", " ", "\\boxed{", "}", "twenty", "A)", "or", "'", "answer:"]
)
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
