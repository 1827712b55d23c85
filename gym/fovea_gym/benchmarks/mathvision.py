r"""MATH-Vision test (Wang et al., arXiv 2402.14804): 3,040 competition problems, multiple choice or free-form.

Prompt: lmms-eval's task `mathvision_test`. Verdict: `evaluate.py` and `utils.py` of github.com/mathllm/MATH-V, whose
`is_equal` evaluates LaTeX to two decimals; here Fovea's parser does so, without `eval`.
"""

from __future__ import annotations

import math
import re

from fovea_gym.benchmarks.base import Benchmark, Row, lettered, letters, of_qwen, texts
from fovea_gym.graders.math_formula import formula_value

_FLAGS = tuple(
    f"{the} {end}"
    for end in ("final answer is", "answer is", "correct answer is", "answer should be")
    for the in ("the", "The")
)
_REMOVED = re.compile(
    r"\\,|\\text|\\mbox|\\left|\\right|\^\{\\circ\}|\^\\circ|\{m\}\^3|m\^3|\{units\}|units|\{km\}|km|\\!|\\?\$|\\%"
)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_DOLLAR = re.compile(r"(?<!\\)\$")
_OUTSIDE_GRAMMAR = re.compile(
    r"\||\\(?:sin|cos|tan|log|ln|lg)(?![A-Za-z])|\\frac(?!\{)|\\frac\{(?:[^{}]|\{[^{}]*\})*\}(?!\{)"
)
_VARIABLE = re.compile(r"(?<![\\a-z])[a-z]")
"""A letter outside a LaTeX command: the script cannot evaluate it, and finds such answers unequal."""


class MathVision(Benchmark):
    """The benchmark `mathvision`."""

    name = "mathvision"
    hub = "MathLLMs/MathVision"
    files = ("data/test-*.parquet", "test.jsonl", "data/test.jsonl")
    columns = ("id", "question", "options", "answer", "level", "subject", "image")
    published = (of_qwen(25.07),)

    def question(self, row: Row) -> str:
        start = f'Please solve the problem step by step and put your answer in one "\\boxed{{}}".{row["question"]}'
        if not (options := texts(row["options"])):
            return start
        choices = lettered(options, "{letter}. {option}")
        end = "Answer the question with the option's letter from the given choices directly."
        return f"{start}\nChoices: {choices}\n{end}"

    def kind(self, row: Row) -> str:
        return str(row["subject"])

    def target(self, row: Row) -> str:
        return rf"\boxed{{{self.answer(row)}}}"

    def is_right(self, row: Row, response: str) -> bool:
        options, truth, found = texts(row["options"]), self.answer(row), extracted(response)
        value = dict(zip(letters(options), options, strict=True))[truth] if options else ""
        return is_equal(truth, found) or is_equal(value, found)


def extracted(response: str) -> str:
    """The answer in a response, in the script's plain form."""
    answer = response.strip()
    for letter in "ABCDE":
        ends = (f" {letter}.", f" ({letter}).")
        if answer.endswith(ends) or answer.startswith((f"{letter}\n", f"({letter})\n", f"({letter}) {letter}\n")):
            answer = letter
    said = answer.split("is ")[-1].rstrip(".")
    if _is_number(said):
        answer = said
    if "oxed{" not in answer:
        for flag in _FLAGS:
            before, answer = answer, answer.split(flag)[-1].strip()
            answer = answer.split("\n")[0].split(". ")[0] if flag in before else answer
    elif answer.count("oxed{") > 1:
        answer = "\\boxed{" + answer.split("oxed{")[-1]
    bare = re.sub(r"\{([a-e])\}", r"\1", re.sub(r"\(([a-e])\)", r"\1", _plain(answer)))
    return bare.rstrip(".").lstrip(":").strip()


def _plain(answer: str) -> str:
    """The content of the box, else the whole text, in lower case without units and LaTeX's spacing."""
    answer = answer.lower().replace("{}", "")
    box, end, _ = answer.partition("oxed{")[2].rpartition("}")
    answer = box if end else answer
    if "}" in answer and "{" not in answer.partition("}")[0]:
        answer = answer.partition("}")[0]
    answer = answer.split("=")[-1].split("\\approx")[-1].replace(" ", "").replace("∞", "\\infty")
    answer = (
        answer.replace("+\\infty", "\\infty")
        .replace("\\\\", "\\")
        .replace("\n", "")
        .replace("tfrac", "frac")
        .replace("dfrac", "frac")
    )
    answer = _REMOVED.sub("", answer)
    answer = re.sub(r"^\.", "0.", answer.replace("{.", "{0."))
    answer = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", answer)
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", answer)


def is_equal(one: str, other: str) -> bool:
    """True if two answers are the same text, or the same number or tuple to two decimals."""
    one, other = one.lower(), other.lower()
    if not one.strip() or not other.strip():
        return False
    if one.strip() == other.strip():
        return True
    one, other = _tuple(one), _tuple(other)
    value = _value(one)
    return one == other or (value is not None and value == _value(other))


def _tuple(text: str) -> str:
    """A tuple or list with its numbers to two decimals; any other text unchanged."""
    parts = text[1:-1].split(",")
    if len(parts) < 2 or (text[0], text[-1]) not in {("(", ")"), ("[", "]")}:
        return text
    shown = [part if "infty" in part or part in {"a", "-a"} else _value(part) for part in parts]
    return text if None in shown else f"{text[0]}{','.join(map(str, shown))}{text[-1]}"


def _value(text: str) -> float | None:
    """The value of a LaTeX formula to two decimals, as latex2sympy reads it; None for other texts."""
    text = _DOLLAR.sub("", _THOUSANDS.sub("", _up_to_unopened(text))).replace("\\displaystyle", "")
    if _VARIABLE.search(text) or _OUTSIDE_GRAMMAR.search(text):
        return None
    # insert the signs of implicit products; latex2sympy also reads a mixed number as a product
    text = re.sub(r"(?<=\d)\\frac|(?<=\})\s*(?=\d)", lambda found: rf"\cdot{found[0]}", text).replace(":", "/")
    text = re.sub(r"(?<!\\sqrt)\[([^\[\]]*)\]", r"(\1)", text)
    text = re.sub(r"\b(1?\d)!", lambda found: str(math.factorial(int(found[1]))), text)
    value = formula_value(text)
    return None if value is None else round(value.value, 2)


def _up_to_unopened(text: str) -> str:
    """The text up to the first closing bracket without an opening one."""
    depth = 0
    for place, mark in enumerate(text):
        depth += (mark in "([{") - (mark in ")]}")
        if depth < 0:
            return text[:place]
    return text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
