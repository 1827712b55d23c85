r"""One boxed answer counts for one value: no chain, list or rounded value is right for two truths."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.environments.geo3k import grade
from tests.tables import table

# Names alone are left out: `x = y` says the value y of x, and is right for both.
TRUTHS = [
    *(
        "12",
        "60",
        "6",
        "5.5",
        "6.71",
        r"3 \sqrt { 5 }",
        "3",
        "4",
        "-8",
        "1200",
        r"13 \pi",
        "2:3",
        "0.75",
        "4 4/11",
        "50%",
    ),
    *("x < 60", "x \\ge 4", "A B = C D", "a + b = 90", r"\angle 1 \cong \angle 4", r"\angle 6 and \angle 2", "3, 4"),
    *("20 y^2 - 10 y", "[0, 60]", "(3, 4)", "not enough information", "AB and CD"),
]
BETWEEN = [
    *(
        r" \approx ",
        " = ",
        " = x = ",
        r" \text{ or } ",
        " or ",
        ", ",
        " and ",
        r" \pm ",
        " < ",
        r" \le ",
        ": ",
        "; ",
        " ",
    ),
    *(r" \ne ", "|", "/", " + ", " - ", r" \cong ", r" \rightarrow ", r" \text{ to } ", "(", r" \cdot ", " cm ", "}"),
    *(r"\} or \boxed{", r"}, so \boxed{", r" \approx 6 = ", r" \approx x = ", " is not "),
]
BEFORE = ["", "x = ", "AB = ", "x: ", r"\angle A = ", "[", "(", "{", r"\{", "|", r"\approx ", r"x \approx ", "= ", "-"]


def right_for(answer: str) -> list[str]:
    return [truth for truth in TRUTHS if grade(rf"\boxed{{{answer}}}", truth).score == 1]


def test_every_truth_is_right_for_itself_alone() -> None:
    assert [right_for(truth) for truth in TRUTHS] == [[truth] for truth in TRUTHS]


@table("between", BETWEEN)
def test_no_pair_of_answers_is_right_for_two_truths(between: str) -> None:
    pairs = permutations(("12", "6", "5.5", "6.71", r"\frac{11}{2}", r"3 \sqrt{5}"), 2)
    answers = [f"{before}{one}{between}{other}" for before in ("", "x = ") for one, other in pairs]
    assert [answer for answer in answers if len(right_for(answer)) > 1] == []


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(BEFORE),
    st.lists(st.tuples(st.sampled_from(TRUTHS), st.sampled_from([*BETWEEN, "", "]", ")"])), max_size=4),
)
def test_no_hedge_is_right_for_two_truths(before: str, parts: list[tuple[str, str]]) -> None:
    answer = before + "".join(truth + between for truth, between in parts)
    assert len(right_for(answer)) <= 1, right_for(answer)


@table(
    ("answer", "truths"),
    [
        (r"\frac{11}{2} \approx 6", ["5.5"]),
        (r"x = \frac{11}{2} \approx 6", ["5.5"]),
        (r"3\sqrt{5} \approx 6.71", [r"3 \sqrt { 5 }"]),
        (r"AB = \sqrt{45} = 3\sqrt{5} \approx 6.7 \approx 7", [r"3 \sqrt { 5 }"]),
        (r"x \approx 12", ["12"]),
        (r"\approx 6.71", ["6.71"]),
        (r"\frac{11}{2} = 6", []),
        (r"5.5 \approx 6", []),
        (r"\approx 5.5 \approx 6", []),
        (r"x = 3 \text{ or } 4", []),
        ("x = 12 = 6", []),
        ("x = 12, x = 6", []),
        ("x = 12 or x = 6", []),
        ("AB = 12, BC = 6", []),
    ],
)
def test_of_a_rounded_answer_the_exact_side_counts(answer: str, truths: list[str]) -> None:
    assert right_for(answer) == truths
