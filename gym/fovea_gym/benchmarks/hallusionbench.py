"""HallusionBench (Guan et al., arXiv 2310.14566): yes-no questions, each about a picture and an edited version of it.

Prompt: lmms-eval's task `hallusion_bench_image`, the bare question. Verdict: the word yes or no, as VLMEvalKit reads it
(github.com/open-compass/VLMEvalKit, `YOrN_Extraction`), which published figures use; the official script asks GPT
instead. Scores: `utils.py` of github.com/tianyi-lab/HallusionBench. aAcc is the accuracy over all answers, fAcc the
share of figures whose questions are all right, qAcc the share of questions that are right for all of their figures.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from fovea_gym.benchmarks.base import Benchmark, Published, Row
from fovea_gym.benchmarks.estimates import Estimate, estimate

_MARKS = ';/[]"{}()=+\\_-><@`,?!'
_MOST_STOPS = 32
"""Most full stops that VLMEvalKit removes."""
_GPT_4V = "GPT-4V, judged by GPT-4"
_SOURCE = "github.com/tianyi-lab/HallusionBench"


class HallusionBench(Benchmark):
    """The benchmark `hallusionbench`."""

    name = "hallusionbench"
    hub = "lmms-lab/HallusionBench"
    files = ("HallusionBench.json", "data/image-*.parquet")
    columns = ("category", "subcategory", "set_id", "figure_id", "question_id", "question", "gt_answer")
    published = tuple(
        Published(percent=percent, model=_GPT_4V, source=_SOURCE, score=score)
        for score, percent in (("aAcc", 65.28), ("fAcc", 39.88), ("qAcc", 28.79))
    )

    def question(self, row: Row) -> str:
        return str(row["question"])

    def images(self, row: Row) -> list[object]:
        """The picture; None for a question that is asked without one."""
        return [row.get("image") or row.get("filename")]

    def answer(self, row: Row) -> str:
        return "Yes" if str(row["gt_answer"]) == "1" else "No"

    def kind(self, row: Row) -> str:
        return f"{row['category']} {row['subcategory']}"

    def is_right(self, row: Row, response: str) -> bool:
        said = yes_or_no(response)
        # a question that is asked without its figure cannot be answered, and a model may say so
        return _is_without_figure(row) if said is None else said == self.answer(row)

    def scores(self, graded: Iterable[tuple[Row, float]]) -> dict[str, Estimate]:
        every, figures, questions = (
            list[float](),
            defaultdict[str, list[float]](list),
            defaultdict[str, list[float]](list),
        )
        for row, accuracy in graded:
            part = f"{row['category']} {row['subcategory']} {row['set_id']}"
            every.append(accuracy)
            questions[f"{part} {row['question_id']}"].append(accuracy)
            if not _is_without_figure(row):
                figures[f"{part} {row['figure_id']}"].append(accuracy)
        groups = {"fAcc": figures, "qAcc": questions}
        return {"aAcc": estimate(every)} | {
            name: estimate([min(each) for each in group.values()]) for name, group in groups.items()
        }


def yes_or_no(response: str) -> str | None:
    """`Yes` or `No`, whichever word a response contains; None if it contains both or neither."""
    text = plain = response.lower()
    has_number = re.search(r"\d,\d", text) is not None
    for mark in _MARKS:
        ends_word = has_number or f"{mark} " in text or f" {mark}" in text
        plain = plain.replace(mark, "" if ends_word else " ")
    words = re.sub(r"(?<!\d)\.(?!\d)", "", plain, count=_MOST_STOPS).split()
    return ("Yes" if "yes" in words else "No") if ("yes" in words) != ("no" in words) else None


def _is_without_figure(row: Row) -> bool:
    return row["category"] == "VS" and str(row["figure_id"]) == "0"
