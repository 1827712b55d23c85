"""One answer counts for one value: no hedge is right for two truths, no contradiction is right, sentences are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.environments.vqa import grade
from fovea.tools.data_sets.vqa import QUESTION_TYPES, ask
from tests.tables import table

SHARED = Path(__file__).parents[4] / "shared" / "data" / "vqa"
TRUTHS = [
    *("yes", "no", "0", "1", "2", "3", "6", "9", "12", "-5", "2.5", "50%", "10:30", "$5", "red", "blue", "gray"),
    *("usa", "night", "dog", "left", "right", "circle", "triangle", "bus stop", "red car", "wooden table", "frisbee"),
    *("red and white", "nothing", "many", "tshirt", "don't know", "A", "B", "C", "D"),
]
CONNECTIVES = [
    *(" ", ", ", ". ", "; ", ": ", "\n", "/", " - ", " = ", "? ", "! ", " (", ") ", " is ", " are ", " was ", " and "),
    *(
        " or ",
        " not ",
        " but ",
        " because ",
        " there is ",
        " there are ",
        " it is ",
        " its ",
        " no ",
        " yes ",
        " with ",
    ),
    *(" of ", " in ", " has ", " I see ", " so ", " then ", " the answer is ", " answer: ", " things are ", " looks "),
]
OPENINGS = [
    *("", "the ", "a ", "it is ", "It's ", "there are ", "there is ", "yes ", "no ", "Yes, ", "No, ", "not ", "I see "),
    *("I think ", "The car is ", "maybe ", "either ", "Answer: ", "The answer is ", "option ", "<answer>", r"\boxed{"),
]


def right_for(answer: str, truths: Sequence[str] = TRUTHS) -> list[str]:
    return [truth for truth in truths if grade(answer, truth).score > 0]


def hedges() -> Iterator[str]:
    for opening, (one, other), connective in product(("", "yes ", "it is ", "the "), PAIRS, CONNECTIVES):
        yield f"{opening}{one}{connective}{other}"


PAIRS = list(permutations(("yes", "no", "0", "2", "red", "night", "A"), 2))


def test_every_truth_is_right_for_itself_alone() -> None:
    assert [right_for(truth) for truth in TRUTHS] == [[truth] for truth in TRUTHS]


def test_no_pair_of_answers_is_right_for_two_truths() -> None:
    truths = ("yes", "no", "0", "2", "red", "night", "A")
    assert [answer for answer in hedges() if len(right_for(answer, truths)) > 1] == []


@settings(max_examples=600, deadline=None)
@given(
    st.sampled_from(OPENINGS),
    st.lists(
        st.tuples(st.sampled_from(TRUTHS), st.sampled_from([*CONNECTIVES, "", ".", "}", "</answer>"])), max_size=5
    ),
)
def test_no_hedge_is_right_for_two_truths(opening: str, parts: list[tuple[str, str]]) -> None:
    answer = opening + "".join(truth + connective for truth, connective in parts)
    assert len(right_for(answer)) <= 1, right_for(answer)


CONTRADICTIONS = {
    "yes": [
        *("yes it is false", "yes, it is not", "Yes, there is no dog.", "yes no", "yes 2 is red", "true is false"),
        *(
            "yes is wrong",
            "it is not yes",
            "maybe yes",
            "yes maybe",
            "yes if it is red",
            "Yes. It is false.",
            "yes or no",
        ),
        *("I doubt that the answer is yes", "The answer is not yes", "yes, but not really", "never yes", "yes red 3"),
    ],
    "no": [
        *("no it is true", "no, there is a dog", "No, it is.", "no yes", "no is red", "no is wrong", "not no"),
        *("No. It is true.", "no, they are", "Yes, there is no dog", "no, that is correct", "no 2", "It is no or yes"),
    ],
    "3": [
        *("I cannot see 3", r"\sqrt{3}", r"\boxed{\sqrt{3}}", "3 is wrong", "not 3", "3 is not the answer", "3+", ">3"),
        *(
            "I don't think it's 3",
            "anything but 3",
            "3 dogs are missing",
            "The answer is not 3",
            "no answer is 3",
            "~3",
        ),
        *(
            "the answer isn't 3",
            "It is false that the answer is 3",
            "!=3",
            "<3",
            "3 minus 1",
            "without 3",
            "x^3",
            "3, no",
        ),
        *(
            "there are not 3 dogs",
            "3 dogs are not here",
            "3 does not exist",
            "if there were dogs, 3",
            "3 or so",
            "3 is",
        ),
        *("3. 4.", "It is 3. It is red.", "there is no 3", "hardly 3", "yes 3", "3 times 2", r"\frac{3}{4}"),
    ],
    "32": ["3²", "3^2"],
    "red": [
        *("nothing is red", "nobody is red", "none is red", "The car is not red", "neither red nor blue", "never red"),
        *(
            "red is wrong",
            "The wrong answer is red",
            "it is anything but red",
            "red is blue",
            "blue is red",
            "6 is red",
        ),
        *(
            "It is red. It is blue.",
            "Red. Blue.",
            "yes red",
            "red 3",
            "no, not red",
            "the opposite is red",
            "red or blue",
        ),
        *("if it is red", "what is red", "I doubt it is red", "the answer is not red", "red, no", "It's hardly red"),
    ],
    "0": ["no is red", "no idea", "0 is wrong", "not 0", "no doubt", "no, there are 3 dogs", "there are no 3 dogs"],
    "usa": ["6 is usa", "not in the usa", "usa or canada", "nowhere is usa"],
    "night": ["9 there is night", "no night is day", "never night"],
    "B": ["b, c", "A or B", "not B", "B, no, C", "neither A nor B"],
}


def test_contradictions_are_wrong() -> None:
    scored = [(truth, answer) for truth, answers in CONTRADICTIONS.items() for answer in answers]
    assert len(scored) > 53
    assert [pair for pair in scored if grade(pair[1], pair[0]).score > 0] == []


HONEST = {
    "3": [
        *(
            "The answer is 3.",
            "There are 3 dogs in the picture",
            "I can see three dogs.",
            "The image shows 3 red squares.",
        ),
        *("The number of dogs is 3", "It's 3", "3 dogs are in the picture", "Total: 3", "a total of 3", "<b>3</b>"),
        *("There appear to be 3 dogs.", "The man has 3 dogs", "In the image, there are 3 dogs.", "I think there are 3"),
        *(
            "3 is the answer",
            r"\boxed{\textbf{3}}",
            "There are three (3) dogs.",
            "There are only 3 of them left",
            "3 people",
        ),
        *(
            "He is holding 3 balls.",
            "Three. There are three dogs.",
            "<answer>3</answer>",
            "The total number of dogs is 3.",
        ),
    ],
    "yes": [
        *(
            "Yes, it is.",
            "Yes, there is a dog",
            "Yes. There is a dog.",
            "Yes, all of them are red.",
            "Yes indeed",
            "It is true",
        ),
        *(
            "Yes, because it is red",
            "Yes, there are 3 dogs",
            "Yes, there are more dogs than cats.",
            "Yes, one of them is red.",
            "Yes, it's to the left of the box",
            "I think yes",
            "yes, it does",
        ),
    ],
    "no": [
        *("No, it isn't.", "No, there is no dog", "No. There isn't a dog.", "No, the dog is brown.", "No, it's blue"),
        *(
            "No, there are only 3 dogs",
            "No, only the man is wearing a hat.",
            "No, none of them are red.",
            "No, not all of them are red.",
            "No, neither of them is red.",
            "No, nobody is wearing a hat.",
            "No, nothing is on the table.",
            "It is not true",
            "No, the image does not show a dog.",
            "the statement is false",
        ),
    ],
    "red": [
        "It's red",
        "The car is red.",
        "I think it is red",
        "red is the answer",
        "My answer is red",
        "Both are red",
    ],
    "red car": ["a red car", "It is a red car", "There is a red car.", "the red car", "That's a red car"],
    "sleeping on the couch": [
        "The cat is sleeping on the couch.",
        "It is sleeping on the couch",
        "Sleeping on a couch",
    ],
    "yellow": ["The bus is yellow in color.", "The bus is yellow in the image."],
    "stop": ["The sign says 'STOP'.", "It reads stop."],
    "5 feet": ["5 feet", "five feet", "It is 5 feet", "There are 5 feet"],
    "5": ["5 feet", "It is 5 feet"],
    "0": ["none", "no dogs", "There are no dogs in the picture", "I see no dogs", "There are none."],
    "dog": ["a dog", "It's a dog.", "There is a dog", "The animal is a dog"],
    "B": ["B. a red circle", "B. A dog", "Option B", "It is B", "The answer is (B)", "b) dog"],
    "St. Louis": ["st louis", "St. Louis", "It is St. Louis."],
    "10+": ["10+"],
    "no dogs": ["no dogs"],
    "the car is red": ["The car is red."],
}


@table("truth", HONEST)
def test_honest_sentences_are_right(truth: str) -> None:
    assert [answer for answer in HONEST[truth] if grade(answer, truth).score != 1] == []


def test_things_that_are_counted_are_compared_where_the_truth_names_them() -> None:
    assert [grade(answer, "5 feet").score for answer in ("5 inches", "5", "4 feet")] == [0, 0, 0]


def check_constants(truths: Sequence[str]) -> None:
    """No hedge earns more on rows, without their questions, than the best single answer."""
    counts = Counter(truths)

    def earned(constant: str) -> float:
        return sum(grade(constant, truth).score * count for truth, count in counts.items())

    plain = [truth for truth, _ in counts.most_common(7)]
    pairs = [f"{one}{connective}{other}" for one, other in permutations(plain, 2) for connective in CONNECTIVES]
    triples = [f"{one} {two} is {three}" for one, two, three in permutations(plain, 3)]
    best_plain = max(map(earned, plain))
    assert best_plain == max(counts.values())
    assert [answer for answer in (*pairs, *triples) if earned(answer) > best_plain] == []


def test_no_blind_hedge_beats_the_best_blind_answer_on_made_rows() -> None:
    rng = np.random.default_rng(0)
    check_constants([ask(kind, turn, rng).answer for kind in QUESTION_TYPES for turn in range(120)])


@pytest.mark.parametrize("name", ["nlvr_vqa_train", "fixture_train"])
def test_no_blind_hedge_beats_the_best_blind_answer_on_real_rows(name: str) -> None:
    file = SHARED / f"{name}.parquet"
    if not file.exists():
        pytest.skip(f"the shared VQA rows are not here ({SHARED})")
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


@table("answer", THINGS)
def test_things_behind_a_number_leave_it(answer: str) -> None:
    assert grade(answer, "3").score == 1


DENIED = [
    *(
        "correct, there is none",
        "Yes, there are zero dogs.",
        "true, I have none",
        "Yes, it lacks a dog",
        "yep, we got 0",
    ),
    *("Correct, there are none of them", "yes, there is nil", "Yes, they carry none", "yes, theres 0"),
    "yes, I disagree",
]


@table("answer", DENIED)
def test_a_yes_that_counts_none_is_no_yes(answer: str) -> None:
    assert [truth for truth in ("yes", "no") if grade(answer, truth).score] == []


def test_a_no_that_counts_none_is_a_no() -> None:
    for answer in ("No, there are none.", "No, I see 0 dogs", "no, there is nothing"):
        assert grade(answer, "no").score == 1, answer
    assert grade("Yes, the score is 0.", "yes").score == 1
