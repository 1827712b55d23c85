"""V* Bench (Wu and Xie, arXiv 2312.14135): 191 multiple-choice questions about small objects in large pictures.

Prompt and verdict: lmms-eval's task `vstar_bench`; the authors' script has no rule for written answers, since it takes
the option with the highest likelihood. If a response has `<answer>` tags or a box, only their content is read, as in
the evaluation of DeepEyes (github.com/Visual-Agent/DeepEyes, `eval`).
"""

from __future__ import annotations

import re

from fovea_gym.benchmarks.base import Benchmark, Published, Row, lettered, of_qwen
from fovea_gym.graders.math_answer import last_boxed

_DEEPEYES = "arXiv 2505.14362, table 1"
_OPTION = re.compile(r"\([A-D]\)")
_FORMS = (
    re.compile("^([A-D])"),
    re.compile(r"(?:ANSWER|CHOICE|OPTION)(?:\s+IS)?[\s:]+([A-D])"),
    re.compile(r"\(([A-D])\)"),
    re.compile(r"([A-D])\s*[.)\]]"),
    re.compile(r"(?:^|\s)([A-D])(?:\s|$)"),
    re.compile("^[^A-D]*([A-D])[^A-D]*$"),
)
"""Forms of an answer in capitals, of which the first that matches counts; the last is a text with one such letter."""


class VStar(Benchmark):
    """The benchmark `vstar`."""

    name = "vstar"
    hub = "craigwu/vstar_bench"
    files = ("test_questions.jsonl", "data/test-*.parquet")
    columns = ("image", "text", "category", "label")
    published = (
        of_qwen(71.2, f"{_DEEPEYES}, which measured it"),
        Published(percent=90.1, model="DeepEyes-7B, which zooms", source=_DEEPEYES),
    )

    def question(self, row: Row) -> str:
        text = str(row["text"])
        # lmms-eval leaves out options that contain brackets
        options = [each.strip() for each in _OPTION.split(text)[1:] if each and not set(each) & set("()")]
        if options:
            text = f"{text.partition('(A)')[0].strip()}\n{lettered(options[:4], '{letter}. {option}')}"
        return f"{text}\nAnswer with the option's letter from the given choices directly."

    def answer(self, row: Row) -> str:
        return str(row["label"]).strip().upper()

    def kind(self, row: Row) -> str:
        return str(row["category"])

    def is_right(self, row: Row, response: str) -> bool:
        return chosen_letter(response) == self.answer(row)


def chosen_letter(response: str) -> str | None:
    """The option A to D that a response names; None if it names none, or several in no known form."""
    _, opened, tagged = response.partition("<answer>")
    answer, closed, _ = tagged.partition("</answer>")
    said = answer if opened and closed else response
    boxed = last_boxed(said)
    capitals = (said if boxed is None else boxed).strip().upper()
    return next((found[1] for form in _FORMS if (found := form.search(capitals))), None)
