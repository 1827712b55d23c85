"""One answer counts for one value: no hedge is right for two truths, no contradiction is right, sentences are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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


def test_every_truth_is_right_for_itself_alone() -> None:
    assert [right_for(truth) for truth in TRUTHS] == [[truth] for truth in TRUTHS]


def test_no_pair_of_answers_is_right_for_two_truths() -> None:
    truths = ("yes", "no", "0", "2", "red", "night", "A")
    openings = ("", "yes ", "it is ", "the ")
    parts = product(openings, permutations(truths, 2), CONNECTIVES)
    answers = [f"{opening}{one}{connective}{other}" for opening, (one, other), connective in parts]
    assert [answer for answer in answers if len(right_for(answer, truths)) > 1] == []


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
    *("correct, there is none", "Yes, there are zero dogs.", "true, I have none", "Yes, it lacks a dog"),
    *("yep, we got 0", "Correct, there are none of them", "yes, there is nil", "Yes, they carry none"),
    *("yes, theres 0", "yes, I disagree"),
]


@table("answer", DENIED)
def test_a_yes_that_counts_none_is_no_yes(answer: str) -> None:
    assert [truth for truth in ("yes", "no") if grade(answer, truth).score] == []


def test_a_no_that_counts_none_is_a_no() -> None:
    for answer in ("No, there are none.", "No, I see 0 dogs", "no, there is nothing"):
        assert grade(answer, "no").score == 1, answer
    assert grade("Yes, the score is 0.", "yes").score == 1
