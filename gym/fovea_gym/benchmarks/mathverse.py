"""MathVerse testmini (Zhang et al., arXiv 2403.14624): 788 problems in five versions, from mostly text to picture only.

Prompt: lmms-eval's task `mathverse_testmini`. Verdict: `score_answer_s2.py --quick_match` of
github.com/ZrrSkywalker/MathVerse, on the answer that the response ends with. The published figures are GPT's verdicts,
which accept other forms of an answer: set judge and second_opinion=wrong to get close to them.
"""

from __future__ import annotations

import re

from fovea_gym.benchmarks.base import Benchmark, Row, final_answer, of_qwen

_LETTER = re.compile(r"\(?([A-H])\)?(?:[.:)\s].*)?", re.DOTALL)


class MathVerse(Benchmark):
    """The benchmark `mathverse`."""

    name = "mathverse"
    hub = "AI4Math/MathVerse"
    files = ("testmini.parquet", "data/testmini-*.parquet", "testmini.json")
    columns = ("image", "answer", "question_type", "problem_version", "query_wo", "question_for_eval")
    published = (of_qwen(47.9, "github.com/ModalMinds/MM-EUREKA"),)

    def question(self, row: Row) -> str:
        return str(row["query_wo"]).strip()

    def kind(self, row: Row) -> str:
        return str(row["problem_version"])

    def is_right(self, row: Row, response: str) -> bool:
        answer = final_answer(response)
        picked = _LETTER.fullmatch(answer) if row["question_type"] == "multi-choice" else None
        return quick_match(row, picked[1] if picked else answer)


def quick_match(row: Row, extraction: str) -> bool:
    """True if an extracted answer is equal to the true one, character by character."""
    return extraction.replace("Extracted Answer: ", "").strip() == row["answer"]
