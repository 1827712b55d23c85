"""MathVista testmini (Lu et al., arXiv 2310.02255): 1,000 questions, multiple choice or with a number as the answer.

Prompt: lmms-eval's task `mathvista_testmini_cot`. Verdict: `extract_answer.py` (its rules, with `--quick_extract`) and
`calculate_score.py` of github.com/lupantech/MathVista. Where the script asks GPT to extract the answer, Fovea takes the
answer at the end of the response.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress

from fovea_gym.benchmarks.base import Benchmark, Row, final_answer, lettered, letters, of_qwen, texts

_FLOAT = "requiring a floating-point number with"
_HINTS = {
    "text": "and provide the correct option letter, e.g., A, B, C, D",
    "integer": "requiring an integer answer and provide the final value, e.g., 1, 2, 3",
    "list": "requiring a Python list as an answer and provide the final list, e.g., [1, 2, 3], [1.2, 1.3, 1.4]",
    "float1": f"{_FLOAT} one decimal place and provide the final value, e.g., 1.2, 1.3, 1.4",
    "float2": f"{_FLOAT} two decimal places and provide the final value, e.g., 1.23, 1.34, 1.45",
}
_NUMBER = re.compile(r"-?\d[\d,]*\.?\d*|-?\.\d+")


class MathVista(Benchmark):
    """The benchmark `mathvista`."""

    name = "mathvista"
    hub = "AI4Math/MathVista"
    files = ("data/testmini-*.parquet", "testmini-*.parquet")
    columns = ("question", "choices", "unit", "precision", "answer", "question_type", "answer_type", "metadata")
    published = (of_qwen(68.2),)

    def question(self, row: Row) -> str:
        unit = f" (Unit: {row['unit']})" if row["unit"] else ""
        lines = [f"Question: {row['question']}{unit}"]
        if choices := texts(row["choices"]):
            lines += ["Choices:", lettered(choices, "({letter}) {option}")]
        places = str(row["precision"])[0] if row["answer_type"] == "float" else ""
        hint = _HINTS[f"{row['answer_type']}{places}"]
        return "\n".join([*lines, f"Hint: Please answer the question {hint}, at the end."])

    def kind(self, row: Row) -> str:
        metadata = row["metadata"]
        return str(metadata["task"]) if isinstance(metadata, dict) else "all"

    def is_right(self, row: Row, response: str) -> bool:
        found = quick_extraction(row, response)
        return verdict(row, _last(row, response) if found is None else found)


def quick_extraction(row: Row, response: str) -> str | None:
    """The answer in a response by the official rules; None if the script would ask GPT for it."""
    if response == "" or (row["question_type"] == "multi_choice" and response in texts(row["choices"])):
        return response
    with suppress(ValueError):
        if row["answer_type"] == "integer":
            return str(int(response))
        if row["answer_type"] == "float":
            return str(float(response))
    for line in response.split("\n"):  # the script's pattern 'The answer is "(.*)"\.', in linear time
        quoted, end, _ = line.partition('The answer is "')[2].rpartition('".')
        if end:
            return quoted
    return None


def verdict(row: Row, extraction: str) -> bool:
    """True if an extracted answer, normalised to the type of the row's answer, equals the true one."""
    return _normalised(row, extraction) == row["answer"]


def _normalised(row: Row, extraction: str) -> str | None:
    if row["question_type"] == "multi_choice":
        return _chosen(texts(row["choices"]), extraction.strip())
    if row["answer_type"] == "list":
        return extraction
    try:
        number = float(extraction)
        return str(int(number) if row["answer_type"] == "integer" else round(number, int(str(row["precision"])[0])))
    except (ValueError, OverflowError):
        return None


def _chosen(choices: Sequence[str], extraction: str) -> str:
    """The choice with the given letter, or else the choice that is most similar to the text."""
    bracketed = re.findall(r"\(([a-zA-Z])\)", extraction)
    said = bracketed[0].upper() if bracketed else extraction
    if len(said) == 1 and said in letters(choices):
        return choices[letters(choices).index(said)]
    return min(choices, key=lambda choice: _edits(said, choice))


def _edits(one: str, other: str) -> int:
    """Insertions, deletions and substitutions between two texts (Levenshtein's distance)."""
    above = list(range(len(other) + 1))
    for row, here in enumerate(one, start=1):
        left = [row]
        for column, there in enumerate(other, start=1):
            left.append(min(above[column] + 1, left[-1] + 1, above[column - 1] + (here != there)))
        above = left
    return above[-1]


def _last(row: Row, response: str) -> str:
    """The answer at the end of a response; for a question with a numeric answer, the last number in it."""
    answer = final_answer(response)
    if row["answer_type"] not in {"integer", "float"}:
        return answer
    numbers: list[str] = _NUMBER.findall(answer)
    return numbers[-1].replace(",", "") if numbers else ""
