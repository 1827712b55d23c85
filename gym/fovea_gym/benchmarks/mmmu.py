"""MMMU validation (Yue et al., arXiv 2311.16502): 900 questions of 30 subjects, some with several images.

Prompt: lmms-eval's task `mmmu_val`, with images at their places. Verdict: `eval_utils.py` of
github.com/MMMU-Benchmark/MMMU. If a response names no option, the script chooses one at random; so does Fovea, with a
seed from the row, so that a response always gets the same verdict.
"""

from __future__ import annotations

import ast
import random
import re

from fovea_gym.benchmarks.base import Benchmark, Row, lettered, letters, of_qwen, texts

_KEY_PHRASES = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
_NUMBERS = (
    re.compile(r"-?\b\d{1,3}(?:,\d{3})+\b"),
    re.compile(r"-?(?<!\d)\d+(?:\.\d+)?[eE][+-]?\d+"),
    re.compile(r"-?(?:(?<!\d)\d+\.\d+|\.\d+|(?<!\d)\d+\b)(?![eE][+-]?\d+)(?![,\d])"),
)
"""The script's patterns; the added `(?<!\\d)` skips starts inside a number, which never match, for linear time."""
_MAX_LIST_CHARS = 10_000
_IMAGE = re.compile(r"<image (\d+)>")


class Mmmu(Benchmark):
    """The benchmark `mmmu`."""

    name = "mmmu"
    hub = "MMMU/MMMU"
    files = ("*/validation-*.parquet", "data/validation-*.parquet")
    columns = ("id", "question", "options", "answer", "question_type", "image_1")
    published = (of_qwen(58.6),)

    def question(self, row: Row) -> str:
        return re.sub("<image [1-7]>", "<image>", _question(row))

    def images(self, row: Row) -> list[object]:
        return [row[f"image_{number}"] for number in sorted(set(_IMAGE.findall(_question(row))))]

    def kind(self, row: Row) -> str:
        return "_".join(str(row["id"]).split("_")[1:-1])

    def answer(self, row: Row) -> str:
        return truths(row)[0]

    def is_right(self, row: Row, response: str) -> bool:
        if row["question_type"] != "multiple-choice":
            return is_right_open(truths(row), response)
        options = options_of(row)
        picked = picked_letter(options, response)
        return (picked or random.Random(str(row["id"])).choice(letters(options))) in truths(row)


def truths(row: Row) -> list[str]:
    """The true answers of a row, which stores a list of several as text."""
    answer = str(row["answer"])
    is_list = row["question_type"] != "multiple-choice" and answer.startswith("[") and answer.endswith("]")
    return _listed(answer) if is_list else [answer]


def picked_letter(options: list[str], response: str) -> str | None:
    """The option that a multiple-choice response names last; None if it names none."""
    for mark in ",.!?;:'":
        response = response.strip(mark)
    response = f" {response} "
    for pattern in ("({})", " {} "):
        if found := [letter for letter in letters(options) if pattern.format(letter) in response]:
            return max((response.rfind(pattern.format(letter)), letter) for letter in found)[1]
    if len(response.split()) <= 5:
        return None
    lower = response.lower()
    places = {letter: lower.rfind(option.lower()) for letter, option in zip(letters(options), options, strict=True)}
    return max((letter for letter, place in places.items() if place >= 0), key=lambda each: places[each], default=None)


def is_right_open(answers: list[str], response: str) -> bool:
    """True if one of the answers is among the texts and numbers that a free-form response may mean."""
    said = {form for text in _claims(response) for form in _forms(text)}
    expected = [form for answer in answers for form in _forms(answer)]
    return any(
        form in said if isinstance(form, float) else any(isinstance(text, str) and form in text for text in said)
        for form in expected
    )


def _claims(response: str) -> list[str]:
    """The ends of the sentences that state a result, and the numbers in them; else the whole response."""
    response = response.strip().strip(".").lower()
    sentences = re.split(r"\.\s(?=[A-Z])|\n", response)
    ends = []
    for place, sentence in enumerate(sentences, start=1):
        phrases = (*_KEY_PHRASES, "=") if place == len(sentences) else _KEY_PHRASES
        found = [sentence.split(phrase)[-1].strip() for phrase in phrases if phrase in sentence]
        shortest = ""
        for end in found:  # an empty end is replaced by the next one
            shortest = end if not shortest or len(end) < len(shortest) else shortest
        if shortest and shortest not in set(":,.!?;'"):
            ends.append(shortest)
    ends = ends or [response]
    return [*ends, *(number for end in ends for pattern in _NUMBERS for number in pattern.findall(end))]


def _forms(text: str) -> list[str | float]:
    """The number to two decimals, or else the text in lower case; a single letter must be next to a space."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        text = text.lower()
        return [f" {text}", f"{text} "] if len(text) == 1 else [text]


def _question(row: Row) -> str:
    if row["question_type"] != "multiple-choice":
        return f"{row['question']}\n\nAnswer the question using a single word or phrase."
    options = lettered(options_of(row), "{letter}. {option}")
    return f"{row['question']}\n{options}\n\nAnswer with the option's letter from the given choices directly."


def options_of(row: Row) -> list[str]:
    return _listed(str(row["options"]))


def _listed(text: str) -> list[str]:
    """The list that a cell holds as a Python literal; ValueError for one that is too long or nested too deeply."""
    if len(text) > _MAX_LIST_CHARS:
        raise ValueError(f"a list of {len(text)} characters")
    try:
        return texts(ast.literal_eval(text))
    except (RecursionError, MemoryError) as error:
        raise ValueError("a list that is nested too deeply") from error
